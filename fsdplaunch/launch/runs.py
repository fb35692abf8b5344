"""The runs in a folder: which there are, how each is doing, where its output is, how to end it.

The folder may lie where others write, and what it names is signalled, cancelled, and given to commands: only what
a run's launcher could have written is believed.
"""

import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fsdplaunch import __version__
from fsdplaunch.errors import EXIT_FAILED, LaunchError, UsageError
from fsdplaunch.features import KUBERNETES, feature
from fsdplaunch.files import Maybe, matches
from fsdplaunch.launch.schedulers import slurm
from fsdplaunch.probe import torch_version
from fsdplaunch.run_dir import (
    JOB,
    LATEST,
    PLAN,
    RESULT,
    REVISION,
    open_file,
    rank_folder,
    read_json,
    write_json,
    write_text,
)
from fsdplaunch.step_record import read_steps

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?")
"""Of an object in a cluster; none begins with a dash, as an option does."""
_JOB = re.compile(r"[0-9]{1,20}(_[0-9]{1,10})?")
_FINISHED_BADLY = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
_GIT_SECONDS = 10.0
_LONGEST = 1e10
"""Seconds that a run or a step may be said to have taken."""
_TASK = "task"
"""Folder of a task of an array inside its run's, with its number."""


def _matching(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and bool(pattern.fullmatch(value))


_PROCESS = {"host": str, "pid": lambda value: type(value) is int and value > 1, "since?": Maybe(int)}
_JOBS = {
    "here": _PROCESS,
    "ssh": _PROCESS | {"hosts?": [str]},
    "slurm": {"job": _matching(_JOB)},
    "kubernetes": {"name": _matching(_NAME), "namespace?": Maybe(_matching(_NAME))},
}
"""What each route knows a run by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run."""

    id: str  # its name, which is its folder's
    dir: Path
    route: str  # how it was started: here, slurm, ssh or kubernetes
    job: Mapping[str, Any]
    script: str
    state: str  # in one or a few words
    unfinished: bool  # it may still do something
    part: Path  # the folder of its last start, of which a scheduler may have made several
    started: float  # when, in seconds since 1970
    seconds: float | None  # how long it took, or has taken so far; None where nothing says when it ended
    workers: int | None  # over all nodes
    steps: int | None  # that rank 0 has made
    step_seconds: float | None  # the median of rank 0's last ones

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain data."""
        names = [one.name for one in fields(self) if one.name not in ("id", "dir", "part")]
        return {"run_id": self.id, "run_dir": str(self.dir), **{name: getattr(self, name) for name in names}}


def write_job(run_dir: Path, *, route: str, **what: Any) -> None:
    """Note how a run was started, and by which process."""
    pid = os.getpid()
    about = {"route": route, "host": socket.gethostname(), "pid": pid, "since": start_of(pid), **what}
    write_json(run_dir / JOB, about)


def versions() -> dict[str, str | None]:
    """Return what a run is made with."""
    return {"fsdplaunch": __version__, "torch": torch_version.installed(), "python": platform.python_version()}


def note_revision(run_dir: Path, folder: Path) -> None:
    """Note the git revision of a folder, where it has one; beside the run, which does not wait for it."""
    words = ("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # it looks, and a commit of the user's need not wait

    def note() -> None:
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(
                words, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_SECONDS, check=True
            )
            write_text(run_dir / REVISION, said.stdout.decode())

    threading.Thread(target=note, daemon=True).start()


def start_of(pid: int) -> int | None:
    """Return when a process started, in the kernel's ticks; None when there is none, or a zombie."""
    with suppress(OSError, IndexError, ValueError):
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return None if words[0] == "Z" else int(words[19])
    return None


def age_of(since: int) -> float:
    """Return for how long a process has been there that started at a moment in the kernel's ticks."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - since / os.sysconf("SC_CLK_TCK")


def read_runs(folder: Path, *, limit: int | None = None) -> list[Run]:
    """Return the runs in a folder, newest first."""
    found = [path for path in folder.iterdir() if _is_run(path)] if folder.is_dir() else []
    found.sort(key=lambda path: (path / PLAN).stat().st_mtime, reverse=True)
    return [read_run(path) for path in found[:limit]]


def _is_run(path: Path) -> bool:
    return not path.is_symlink() and (path / PLAN).is_file()


def find_run(folder: Path, name: str = LATEST) -> Run:
    """Return the run of this name, or of which alone this is the beginning or the end; or the latest."""
    if not folder.is_dir():
        msg = f"there is no folder {folder}"
        raise UsageError(msg, hint="name the one with the runs: --log-dir DIR")
    if name == LATEST and (folder / name).is_dir():
        name = os.path.basename(os.path.realpath(folder / name))  # noqa: PTH119  (links may lead in a circle)
    elif name == LATEST and (newest := read_runs(folder, limit=1)):  # no links here, or its run was removed
        return newest[0]
    names = [path.name for path in folder.iterdir() if _is_run(path)]
    chosen = [one for one in names if one == name] or [
        one for one in names if one.startswith(name) or one.endswith(name)
    ]
    if len(chosen) != 1:
        some = f"{len(chosen)} runs in {folder} have names like {name}"
        msg = some if chosen else f"no run in {folder} is named {name}"
        raise UsageError(msg, hint="fsdplaunch runs lists them")
    return read_run(folder / chosen[0])


def read_run(path: Path) -> Run:
    """Return a run out of its folder; what no launcher could have written of its start is not believed."""
    # It costs milliseconds, for which a launch, that imports this module, need not wait.
    from fsdplaunch.launch.step_summary import summarize

    job = read_json(path / JOB)
    route = job.get("route")
    if not (isinstance(route, str) and route in _JOBS and matches(job, _JOBS[route])):
        route, job = "here", {}
    age: float | None = None  # of a run that goes on here, by a clock that nobody sets
    if route == "slurm":
        state = _state_of_array(path, slurm.job_states(job["job"]))
    elif (ended := _result_of(path)) is not None:
        state = _ended_state(ended), False
    elif route == "kubernetes":
        state = feature(KUBERNETES).state_of(job)
    elif not job:
        state = "unknown", False
    elif job["host"] != socket.gethostname():
        state = f"started on {job['host']}", True
    elif job.get("since") is not None and start_of(job["pid"]) == job["since"]:  # not another one of its number
        state, age = ("running", True), age_of(job["since"])
    else:
        state = "lost: its launcher is gone", False
    plan, part, started = read_json(path / PLAN), last_start(path), (path / PLAN).stat().st_mtime
    made = read_steps(rank_folder(part, 0))
    said = (_result_of(path) or {}).get("seconds")
    took = [said] if isinstance(said, int | float) else [made.ended - started] if made is not None else []
    if state[1]:
        took = [time.time() - started if age is None else age]
    workers = plan.get("world_size")
    return Run(
        id=path.name,
        dir=path,
        route=route,
        job=job,
        script=str(plan.get("script") or ""),
        state=state[0],
        unfinished=state[1],
        part=part,
        started=started,
        seconds=next((one for one in took if 0 <= one < _LONGEST), None),
        workers=workers if type(workers) is int else None,
        steps=made.made if made is not None else None,
        step_seconds=summarize({0: made}).step_seconds if made is not None else None,
    )


def last_start(run_dir: Path) -> Path:
    """Return the folder of a run's last start, of which a scheduler may have made several, or of a task's."""
    starts = [path for path in (*run_dir.glob("try*"), *run_dir.glob(f"{_TASK}*/try*")) if path.is_dir()]
    return max(starts, key=lambda path: path.stat().st_ctime, default=run_dir)


def _state_of_array(run_dir: Path, reported: Mapping[str, str]) -> tuple[str, bool]:
    """Return the state of a job of SLURM's: of its tasks together, that have started or are known, in an array."""
    started = (path.name.removeprefix(_TASK) for path in run_dir.glob(f"{_TASK}*"))
    numbers = sorted(int(text) for text in {*started, *reported} if text.isdecimal())
    tasks = [_slurm_state(reported.get(str(one)), _result_of(run_dir / f"{_TASK}{one}")) for one in numbers]
    if not tasks:
        return _slurm_state(reported.get(""), _result_of(run_dir))
    counts = Counter(state for state, _ in tasks)
    return ", ".join(f"{count} {state}" for state, count in counts.items()), any(again for _, again in tasks)


def _slurm_state(reported: str | None, ended: Mapping[str, Any] | None) -> tuple[str, bool]:
    """Return the state of a job or of one task of its array; `reported` is None when SLURM has forgotten it."""
    if reported is None:
        return (_ended_state(ended) if ended else "unknown to SLURM"), False
    word, _, reason = reported.partition(" ")
    if word in slurm.UNFINISHED:
        return f"{word.lower()} {reason}".rstrip(), True
    if ended is None or (word.startswith(_FINISHED_BADLY) and not (word == "FAILED" and ended["exit_code"])):
        return word.lower(), False
    return _ended_state(ended), False


def _result_of(run_dir: Path) -> dict[str, Any] | None:
    """Return how the last start of a run ended, of which SLURM may have made several; None when it has not."""
    result = read_json(last_start(run_dir) / RESULT)
    return result if type(result.get("exit_code")) is int else None


def _ended_state(result: Mapping[str, Any]) -> str:
    if result.get("stopped_by"):
        return f"stopped by {result['stopped_by']}"
    return "done" if result["exit_code"] == 0 else f"failed ({result['exit_code']})"


def status_of(run: Run) -> int:
    """Return the status of a run that has ended: its workers' own; of an array, of the first task that failed."""
    if tasks := [_result_of(path) for path in sorted(run.dir.glob(f"{_TASK}*"))]:
        statuses = [EXIT_FAILED if ended is None else int(ended["exit_code"]) for ended in tasks]
        return next(filter(None, statuses), 0)
    if run.route == "kubernetes":
        return int(feature(KUBERNETES).status_of(run.job))
    ended = _result_of(run.dir)
    if ended is None or run.state.startswith(("cancelled", "timeout", "node_fail")):
        return EXIT_FAILED
    return int(ended["exit_code"])


def cancel(run: Run) -> str:
    """Ask a run to end; returns what was done, in words. One that has ended or runs elsewhere is an error."""
    if not run.unfinished:
        msg = f"{run.id} is not running: {run.state}"
        raise UsageError(msg)
    if run.route == "slurm":
        slurm.cancel(str(run.job["job"]))
        return f"asked SLURM to end job {run.job['job']}"
    if run.route == "kubernetes":
        return str(feature(KUBERNETES).delete(run.job))
    if run.job.get("host") != socket.gethostname():
        msg = f"{run.id} was started on {run.job.get('host')}"
        raise LaunchError(msg, hint="run this command there")
    os.kill(int(run.job["pid"]), signal.SIGTERM)
    return f"asked its launcher, process {run.job['pid']}, to end"


_OWN_FOLDER = re.compile(r"((try|task|node)[0-9]+/)*((try|task|node)[0-9]+|ranks(/[0-9]+)?)")
_WEIGHTS = (".safetensors", ".distcp", ".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What stands in a run's folder, as it was looked at."""

    place: tuple[int, int]  # the folder's device and number
    size: int  # bytes
    changed: float  # when anything in it last did, in seconds since 1970
    foreign: str | None  # the first thing in it that no launch writes and might be missed, as a checkpoint is


def look_at_files(run_dir: Path) -> RunFiles:
    """Look at all that a run's folder holds, without following links."""
    top = run_dir.lstat()
    size, changed, foreign = 0, top.st_mtime, None
    for place, folders, files in os.walk(run_dir):
        for path in (Path(place) / name for name in (*folders, *files)):
            found, part = path.lstat(), str(path.relative_to(run_dir))
            is_foreign = path.name in folders and not _OWN_FOLDER.fullmatch(part)
            if is_foreign or path.suffix in _WEIGHTS:
                foreign = foreign or part
            size, changed = size + found.st_size, max(changed, found.st_mtime)
    return RunFiles(place=(top.st_dev, top.st_ino), size=size, changed=changed, foreign=foreign)


def remove_run(run: Run, seen: RunFiles) -> None:
    """Delete a run's folder, if it is still the one that was looked at, as it was; else raise a LaunchError."""
    aside = run.dir.with_name(f".{run.id}.{os.urandom(4).hex()}")  # nothing that comes to its place is touched
    run.dir.rename(aside)
    if look_at_files(aside) != seen:
        aside.rename(run.dir)
        msg = f"{run.id} has changed since it was listed"
        raise LaunchError(msg, hint="list it again: fsdplaunch runs")
    shutil.rmtree(aside)


def log_files(run: Run, *, rank: int | None, stream: str) -> list[Path]:
    """Return the files with a run's output, oldest first: a rank's, or what the launcher showed, else rank 0's."""
    if rank is None and run.route == "slurm":
        return sorted(run.dir.glob("slurm-*.out"), key=lambda path: (len(path.name), path.name))
    found = run.dir.rglob(str(rank_folder(Path(), rank or 0) / f"{stream}*.log"))
    return sorted(found, key=lambda path: path.stat().st_mtime)


class LogTail:
    """What has been added to some files since the last look; files may come later."""

    def __init__(self) -> None:
        self._seen: dict[Path, int] = {}

    def read(self, files: Sequence[Path]) -> bytes:
        """Return the new bytes, file by file."""
        parts = []
        for path in files:
            with suppress(OSError), open_file(path) as file:
                file.seek(self._seen.get(path, 0))
                parts.append(file.read())
                self._seen[path] = self._seen.get(path, 0) + len(parts[-1])
        return b"".join(parts)
