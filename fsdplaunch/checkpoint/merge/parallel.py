"""A merge by several processes or machines: their shares, the processes, and the folder in which parts meet."""

import glob
import hashlib
import json
import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from fsdplaunch.checkpoint.manifest import read_json
from fsdplaunch.checkpoint.merge.options import ProgressMeter
from fsdplaunch.checkpoint.merge.plan import MergePlan, PlannedFile, PlannedTensor
from fsdplaunch.checkpoint.output_folder import short_name, sync_folder
from fsdplaunch.checkpoint.readers.data_files import DataFiles
from fsdplaunch.errors import CheckpointError, UsageError
from fsdplaunch.parent_death import die_with_parent


def files_of_part(files: Sequence[PlannedFile], number: int, count: int) -> tuple[PlannedFile, ...]:
    """Return the files that part `number` of `count` writes; everyone who knows the plan finds the same.

    Each file, the largest first, goes to the part that has the fewest bytes until then. With more parts than files
    some write none.

    Args:
        files: Those of the plan.
        number: From 1 on.
        count: How many parts there are.
    """
    loads = [0] * count
    chosen = set()
    for file in sorted(files, key=lambda each: (-each.nbytes, each.name)):
        part = loads.index(min(loads))
        loads[part] += file.nbytes
        if part == number - 1:
            chosen.add(file.name)
    return tuple(file for file in files if file.name in chosen)


def split_by_tensors(files: Sequence[PlannedFile], count: int) -> list[tuple[PlannedFile, ...]]:
    """Return up to `count` shares of the tensors, of about as many bytes each; a file may be in several."""
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    shares: list[dict[str, list[PlannedTensor]]] = [{} for _ in range(count)]
    done = 0
    for file in files:
        for tensor in file.tensors:
            middle = done + tensor.nbytes / 2
            share = shares[min(count - 1, int(middle * count / total)) if total else 0]
            share.setdefault(file.name, []).append(tensor)
            done += tensor.nbytes
    by_name = {file.name: file for file in files}
    return [
        tuple(replace(by_name[name], tensors=tuple(tensors)) for name, tensors in share.items())
        for share in shares
        if share
    ]


Share = TypeVar("Share")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_jobs(shares: Sequence[Share], work: Callable[[Share, ProgressMeter], None], meter: ProgressMeter) -> None:
    """Work on each share in a process of its own; with one share, in this one.

    Args:
        shares: What there is to do.
        work: Does one share, and counts with the given meter.
        meter: Shows what all of them have done.

    Raises:
        CheckpointError: From the first process that failed, or one was killed; the others are ended.
        OSError: The same.
    """
    if len(shares) == 1:
        work(shares[0], meter)
        return
    jobs: list[_Job] = []
    try:
        with _signals_held():
            for share in shares:
                jobs.append(_Job(share, work, meter))  # noqa: PERF401  (those begun are ended when one cannot be)
        _follow(jobs, meter)
    finally:
        for job in jobs:
            job.end()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Have signals that end this process wait: one between a fork and its notice would lose the child.

    One in a child's first moment would have it do what the parent does then: end the others.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Job:
    """One process, and how far it is."""

    def __init__(self, share: Any, work: Callable[[Any, ProgressMeter], None], meter: ProgressMeter) -> None:
        from multiprocessing import connection  # where there are several processes only

        self.done, self.is_finished, parent = 0, False, os.getpid()
        self.pipe, theirs = connection.Pipe(duplex=False)
        try:
            with warnings.catch_warnings():
                # Other threads may draw a progress bar: the child does not touch what they do.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
            if self.pid == 0:
                _run_and_exit(share, work, meter.phase, theirs, parent)
        except OSError:  # no more processes
            self.pipe.close()
            raise
        finally:
            theirs.close()

    def end(self) -> None:
        """Kill it, if it runs still: what it has written goes with the folder."""
        self.pipe.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _follow(jobs: Sequence[_Job], meter: ProgressMeter) -> None:
    from multiprocessing import connection

    running: dict[Any, _Job] = {job.pipe: job for job in jobs}
    while running:
        for pipe in connection.wait(list(running)):
            job = running[pipe]
            try:
                message = job.pipe.recv()
            except (EOFError, OSError):
                if not job.is_finished:
                    msg = f"process {job.pid} of this merge was killed"
                    hint = "look whether memory ran out (dmesg), or merge with fewer --jobs"
                    raise CheckpointError(msg, hint=hint) from None
                del running[pipe]
                continue
            if isinstance(message, Exception):
                raise message
            job.done, meter.tensor, job.is_finished = message
            meter.tick(sum(each.done for each in jobs) - meter.done)


def _run_and_exit(
    share: Any,
    work: Callable[[Any, ProgressMeter], None],
    phase: Literal["copy", "verify"],
    pipe: Any,
    parent: int,
) -> NoReturn:
    """Do the work of one process, and end it whatever happens."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it as well, and ends all
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        die_with_parent(signal.SIGKILL, parent=parent)
        meter = ProgressMeter(phase, 0, lambda now: pipe.send((now.done, now.tensor, False)))
        work(share, meter)
        pipe.send((meter.done, meter.tensor, True))
        status = 0
    except BaseException as problem:
        known = isinstance(problem, CheckpointError | OSError | MemoryError)
        with suppress(BrokenPipeError):
            pipe.send(problem if known else RuntimeError(f"{type(problem).__name__}: {problem}"))
    finally:
        os._exit(status)


_IDENTITY = "merge.json"
_RESULT = "result.json"
_CLAIMED = re.compile(r"result-[0-9a-f]{8}")
_AGAIN = "give every part the same checkpoint and options, or remove that folder to begin anew"


def plan_digest(plan: MergePlan, sources: DataFiles) -> str:
    """Return what is equal for merges that write the same bytes from the same checkpoint.

    Chunks count with their stored checksums. A file with chunks that have none counts with its size and time.
    """
    digest, undated = hashlib.sha256(plan.index or b""), set()
    for file in plan.files:
        digest.update(file.name.encode() + b"\0" + file.header)
        for tensor in file.tensors:
            for piece in tensor.pieces:
                where = (
                    piece.place.file,
                    piece.file_offset,
                    piece.start,
                    piece.data_length,
                    piece.crc,
                    piece.flip,
                )
                digest.update(repr((where, tensor.offset + piece.target, piece.nbytes)).encode())
                if piece.crc is None:
                    undated.add(piece.place.file)
    for name in sorted(undated):
        status = (sources.folder / name).stat()
        digest.update(repr((name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


class PartsFolder:
    """The folder of one merge in parts.

    Args:
        target: The output folder.
        count: How many parts there are.
        identity: `checkpoint`, `options` by name and `plan`, its digest; the same for all parts.
    """

    def __init__(self, target: Path, count: int, identity: Mapping[str, Any]) -> None:
        self.target, self.count = target, count
        self.folder = _folder_of(target)
        self.files = self.folder / "files"
        self._identity = {"parts": count, **json.loads(json.dumps(identity))}

    def join(self) -> None:
        """Make the folder, or check that the one that is there is of this merge.

        Raises:
            UsageError: It is of another one.
        """
        self.target.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.folder.with_name(f"{self.folder.name}-{os.urandom(4).hex()}")
        (fresh / "files").mkdir(parents=True)
        try:
            _write(fresh / _IDENTITY, self._identity)
            with suppress(OSError):  # it is there, and not empty
                fresh.rename(self.folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        self._compare()

    def _compare(self) -> None:
        found = read_json(self.folder / _IDENTITY)
        if not isinstance(found, dict):
            msg = f"{self.folder / _IDENTITY} cannot be read"
            raise CheckpointError(msg, hint="another part has finished the merge meanwhile, or remove that folder")
        if difference := _difference(self._identity, found):
            msg = f"{self.folder} is of another merge: {difference}"
            raise UsageError(msg, hint=_AGAIN)

    def has(self, number: int, files: Sequence[PlannedFile]) -> bool:
        """Return whether a part has been written, and its files are there."""
        marker = read_json(self.folder / f"part-{number}.json")
        sizes = {file.name: file.nbytes for file in files}
        if marker != {"plan": self._identity["plan"], "files": sizes}:
            return not files
        claimed = not self.files.exists() and bool(self._claimed())
        return claimed or self.is_in_place() or _has_files(self.files, sizes)

    def missing(self, shares: Mapping[int, Sequence[PlannedFile]]) -> tuple[int, ...]:
        """Return the numbers of the parts that have still to be written."""
        with suppress(FileNotFoundError):
            os.listdir(self.folder)  # noqa: PTH208  (a network file system then asks its server for new names)
        return tuple(number for number, files in shares.items() if not self.has(number, files))

    @contextmanager
    def writing(self, number: int, files: Sequence[PlannedFile]) -> Iterator[Path]:
        """Give an empty folder for a part's files; when the block ends well, the part counts as written.

        What earlier attempts of this part left is removed first.

        Raises:
            CheckpointError: Another process has removed this one's folder: it has begun the same part, or put all
                parts in place.
        """
        for left in self.folder.glob(f"part-{number}-*"):
            shutil.rmtree(left, ignore_errors=True)
        own = self.folder / f"part-{number}-{os.urandom(4).hex()}"
        try:
            own.mkdir()
            yield own
            sync_folder(own)
            for file in files:
                (own / file.name).rename(self.files / file.name)
            sync_folder(self.files)
            marker = {"plan": self._identity["plan"], "files": {file.name: file.nbytes for file in files}}
            _write(own / "marker", marker)
            (own / "marker").rename(self.folder / f"part-{number}.json")
            sync_folder(self.folder)
        except FileNotFoundError as problem:
            if own.name not in str(problem.filename):
                raise
            msg = f"another process has begun part {number} of {self.count} after this one, or finished all"
            raise CheckpointError(msg, hint="run each part once at a time") from problem
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def claim(self, *, interrupted: bool) -> Path | None:
        """Take the finished files, to put them in place; None when another process has.

        Args:
            interrupted: Take them from a process that has them and did not end, too.
        """
        for place in [self.files, *(self._claimed() if interrupted else ())]:
            with suppress(FileNotFoundError):
                claimed = self.folder / f"result-{os.urandom(4).hex()}"
                place.rename(claimed)
                note = claimed.with_suffix(".note")
                _write(note, {"inode": claimed.stat().st_ino})
                note.rename(self.folder / _RESULT)
                return claimed
        return None

    def is_in_place(self) -> bool:
        """Return whether the finished files stand as the output folder, and only cleaning up is left."""
        note = read_json(self.folder / _RESULT)
        with suppress(FileNotFoundError):
            return isinstance(note, dict) and note.get("inode") == self.target.stat().st_ino
        return False

    def _claimed(self) -> list[Path]:
        return [path for path in self.folder.glob("result-*") if _CLAIMED.fullmatch(path.name)]


def remove_parts(target: Path) -> None:
    """Remove the folder in which the parts of a finished merge met, and those that came too late to be it."""
    folder = _folder_of(target)
    for path in (folder, *folder.parent.glob(f"{glob.escape(folder.name)}-{'[0-9a-f]' * 8}")):
        shutil.rmtree(path, ignore_errors=True)


def _folder_of(target: Path) -> Path:
    return target.parent / f".{short_name(target)}.parts"


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _has_files(folder: Path, sizes: Mapping[str, int]) -> bool:
    try:
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except FileNotFoundError:
        return False


def _difference(own: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Return how a part's merge differs from the one that is under way, in words; None when it does not."""
    if own["parts"] != found.get("parts"):
        return f"in {found.get('parts')} parts, this one is in {own['parts']}"
    options = found.get("options")
    options = options if isinstance(options, dict) else {}
    for name, value in own["options"].items():
        if options.get(name) != value:
            return f"with {name} {options.get(name)!r}, this one has {value!r}"
    if own["plan"] != found.get("plan"):
        return f"of {found.get('checkpoint')}, and this one, of {own['checkpoint']}, would write other bytes"
    return None
