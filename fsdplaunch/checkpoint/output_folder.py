"""An output folder: checked before anything is read, locked, built under a hidden name beside its place, renamed.

It appears whole or not at all. What is replaced or deleted is what was read, and nothing that came meanwhile.
"""

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from fsdplaunch.checkpoint.untrusted_files import real_path, short
from fsdplaunch.display_text import size_words
from fsdplaunch.errors import CheckpointError, UsageError
from fsdplaunch.files import MEMORY, read_size

# The files that a merge writes; only these are replaced when an output folder is overwritten.
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
_SPARE = 2**20


def check_output(output: Path, sources: tuple[Path, ...], *, overwrite: bool) -> Path:
    """Return the resolved output folder when it may be written, before anything is read from `sources`.

    Raises:
        UsageError: When it holds weights, or lies in, above or on a source.
    """
    target = real_path(output)
    if output.suffix in {".safetensors", ".bin"}:
        msg = f"{output} looks like a file; the output must be a folder"
        raise UsageError(msg, hint=f"use {output.parent}")
    for source in {real_path(path) for path in sources}:
        if target == source or target.is_relative_to(source) or source.is_relative_to(target):
            relation = "is" if target == source else "lies inside" if target.is_relative_to(source) else "contains"
            msg = f"the output {output} {relation} the checkpoint {source}"
            raise UsageError(msg, hint="choose an output folder outside the checkpoint")
    _check_free(output, target, overwrite=overwrite)
    return target


def _check_free(output: Path, target: Path, *, overwrite: bool) -> None:
    """Refuse an existing output that holds merged weights, unless they may be replaced; other files are kept."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        msg = f"the output {output} exists and is not a folder"
        raise UsageError(msg, hint="choose another output folder")
    entries = sorted(target.iterdir())
    check_copies(output, (path.name for path in entries if WEIGHTS.fullmatch(path.name)), overwrite=overwrite)
    odd = [path.name for path in entries if path.is_symlink() or not path.is_file()]
    if odd:
        msg = f"the output {output} holds {odd[0]!r}, which is not a plain file and would be lost"
        raise UsageError(msg, hint="choose another output folder")


def check_copies(output: Path, names: Iterable[str], *, overwrite: bool) -> None:
    """Check that files may be put into the output.

    Raises:
        UsageError: When one of that name is there, and may not be replaced.
    """
    held = [name for name in names if os.path.lexists(output / name)]
    if held and not overwrite:
        msg = f"the output {output} holds {held[0]} already"
        raise UsageError(msg, hint="choose another folder, or replace it: --overwrite, in Python overwrite=True")


def find_space_gap(target: Path, needed: int) -> tuple[str, Path, str] | None:
    """Return the bytes needed, the folder, and the bytes free in it when `needed` bytes do not fit there."""
    place = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(place).free
    return (size_words(needed), place, size_words(free)) if needed + _SPARE > free else None


def check_space(target: Path, needed: int) -> None:
    """Check that `needed` bytes fit where `target` will stand.

    Raises:
        CheckpointError: When they do not, with both numbers.
    """
    if gap := find_space_gap(target, needed):
        msg = f"the merged weights need {gap[0]}, {gap[1]} has {gap[2]} free"
        raise CheckpointError(msg, hint="free some space or choose another disk")


def check_memory(needed: int) -> None:
    """Check that `needed` bytes of memory are available, where the system says how much is.

    Raises:
        CheckpointError: When they are not, with both numbers.
    """
    free = read_size(MEMORY, "MemAvailable")
    if free is not None and needed > free:
        sizes = f"{size_words(needed)}, {size_words(free)} are free"
        msg = f"the torch format needs the full checkpoint in memory: {sizes}"
        raise CheckpointError(msg, hint="merge to safetensors, which needs almost no memory")


_HELD = {errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN}
_ODD = {errno.ELOOP, errno.EISDIR, errno.ENXIO}
_MAX_NOTE = 1024
_POLL_SECONDS = 0.05


class FolderLock:
    """Keeps other processes from writing a folder; one at a time, any number of times.

    The folder need not exist; the one it is in must. Left out, the file that is locked is beside it.
    """

    def __init__(self, folder: Path, file: Path | None = None) -> None:
        self._folder = folder
        self.path = file or folder.parent / f".{folder.name}.lock"
        self._fd = -1

    @property
    def is_held(self) -> bool:
        """Return whether this object holds the lock."""
        return self._fd >= 0

    def acquire(self, seconds: float = 0.0) -> None:
        """Take the lock; wait so long for a process that has it for a moment.

        Raises:
            CheckpointError: Another process holds it; with its node and its number. Or its file is something else.
            OSError: Nothing can be written there.
        """
        end = time.monotonic() + seconds
        while not self.is_held:
            fd = self._open()
            try:
                self._take(fd, end)
                # Who held it before removes the file: it has to be the one that others would open.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), self.path.lstat()):
                        self._fd, fd = fd, -1
            finally:
                if fd >= 0:
                    os.close(fd)
        note = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
        with suppress(OSError):  # the disk is full: the lock is what counts
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, note.encode(), 0)

    def _open(self) -> int:
        """Open its file, which those may open that may write into its folder: whoever can read it can hold it."""
        why = "it is not a regular file"
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            if stat.S_ISREG(os.fstat(fd).st_mode):
                with suppress(OSError):  # it is another's
                    place = self.path.parent.stat()
                    os.fchown(fd, -1, place.st_gid)
                    os.fchmod(fd, 0o600 | (place.st_mode & 0o022) * 3)
                return fd
            os.close(fd)
        except OSError as problem:
            if problem.errno not in _ODD:
                raise
            why = (problem.strerror or str(problem)).lower()
        msg = f"{self._folder} cannot be locked: {self.path}: {why}"
        raise CheckpointError(msg, hint="remove it")

    def _take(self, fd: int, end: float) -> None:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as problem:
                if problem.errno in _HELD and time.monotonic() >= end:
                    break
                if problem.errno in _HELD:
                    time.sleep(_POLL_SECONDS)
                    continue
            return  # it is taken, or the file system has no locks
        holder = "another process"
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            note = json.loads(os.pread(fd, _MAX_NOTE, 0))
            holder = f"process {int(note['pid'])} on {short(str(note['host']))[1:-1]}"
        msg = f"{self._folder} is being written by {holder}"
        raise CheckpointError(msg, hint="give each run a folder of its own, or wait until the other one has ended")

    def release(self) -> None:
        """Give the lock back, if this object holds it."""
        if self.is_held:
            with suppress(OSError):  # it stays, and is no lock any more
                self.path.unlink()
            self.forget()

    def forget(self) -> None:
        """Leave the lock to the process that this one was forked from."""
        if self.is_held:
            os.close(self._fd)
            self._fd = -1


NUMBERED = re.compile(r"checkpoint-([0-9]+)")


def save_locks(target: Path) -> list[FolderLock]:
    """Return the locks, which need not be held, of those who write or delete a checkpoint or others beside it.

    One stands beside the folder that numbered checkpoints are in, or that is replaced as a whole: who does the one
    and who does the other meet there. That of numbered ones may be a mounted disk: they have one in it, too.
    """
    is_numbered = NUMBERED.fullmatch(target.name)
    root = real_path(target.parent if is_numbered else target)
    beside = [FolderLock(root)] if not is_numbered or os.access(root.parent, os.W_OK) else []
    return [*beside, FolderLock(root, root / ".lock")] if is_numbered else beside


# linux/fcntl.h and linux/fs.h
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def rename_exchange(one: Path, other: Path) -> bool:
    """Exchange two files or folders; False where the kernel or the file system cannot: then nothing is done."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform.startswith("linux") else None
    if rename is None:
        return False
    done: int = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return done == 0


_NAME_PART = 30  # characters; a file name has 255 bytes, a character up to 4


@contextmanager
def atomic_output(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give an empty hidden folder beside `target` that becomes `target` when the block ends well.

    On any exception, Ctrl-C included, the hidden folder is removed and `target` is left as it was. What a killed
    merge left is removed: who holds the lock is the only one who writes there. With `overwrite`, weights in it are
    replaced; all other files are kept.
    """
    new_parents = [parent for parent in target.parents if not parent.exists()]
    name = target.name
    if len(name) > _NAME_PART:  # it is added to
        name = f"{name[:_NAME_PART]}-{sha256(name.encode()).hexdigest()[:16]}"
    hidden = f".{name}.partial-"
    partial = target.parent / (hidden + os.urandom(4).hex())
    lock = FolderLock(target, target.parent / f"{hidden}lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        for path in target.parent.iterdir():
            if re.fullmatch(re.escape(hidden) + r"[0-9a-f]{8}", path.name):
                shutil.rmtree(path, ignore_errors=True)
        partial.mkdir()
        yield partial
        _publish(partial, target, overwrite=overwrite)
        lock.release()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()
        with suppress(OSError):
            for parent in new_parents:
                parent.rmdir()
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as problem:
        if problem.errno != errno.EINVAL:  # some file systems cannot sync a folder
            raise
    finally:
        os.close(fd)


def _publish(partial: Path, target: Path, *, overwrite: bool) -> None:
    """Rename the finished folder into place, keeping other files of a folder that is overwritten."""
    sync_folder(partial)
    _check_free(target, target, overwrite=overwrite)  # another program may have made it meanwhile
    check_copies(target, (path.name for path in partial.iterdir()), overwrite=overwrite)
    if not target.is_dir() or not any(target.iterdir()):
        partial.rename(target)
    else:
        shutil.copymode(target, partial)
        aside = partial.with_name(partial.name + "-old")
        replace_folder(partial, target, aside, lambda name: WEIGHTS.fullmatch(name) is None)
    try:
        sync_folder(target.parent)
    except OSError as problem:
        msg = f"{target} is complete, but may not be on disk yet: {problem.strerror}"
        raise CheckpointError(msg, hint="check the disk or the file server, and compare the files") from None


def keep_entries(entries: Iterable[Path], folder: Path) -> None:
    """Link files and folders into `folder`, but for those whose names it has already."""
    for path in entries:
        place = folder / path.name
        if os.path.lexists(place):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, place, symlinks=True, copy_function=_link)
        else:
            _link(path, place)


def _link(source: str | Path, place: str | Path) -> None:
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, place, follow_symlinks=False)


def replace_folder(partial: Path, target: Path, aside: Path, stays: Callable[[str], bool]) -> None:
    """Put `partial` in the place of the folder `target`, with the entries of that which stay, and remove the rest.

    The old one waits `aside` on file systems that cannot exchange two folders.

    Raises:
        CheckpointError: Another folder has come into its place meanwhile, and is there.
    """
    _discard(aside)
    before = os.open(target, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        keep_entries([path for path in target.iterdir() if stays(path.name)], partial)
        sync_folder(partial)
        old = partial if rename_exchange(partial, target) else aside
        if old is aside:
            target.rename(aside)
        try:
            if not os.path.samestat(os.fstat(before), old.lstat()):
                msg = f"{target} was replaced by another program in the meantime"
                raise CheckpointError(msg, hint="give each program a folder of its own")
            if old is aside:
                partial.rename(target)
        except BaseException:
            if old is aside:
                aside.rename(target)
            else:
                rename_exchange(partial, target)
            raise
    finally:
        os.close(before)
    keep_entries([path for path in old.iterdir() if stays(path.name)], target)  # what has come into it meanwhile
    _discard(old)


def _discard(path: Path) -> None:
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
