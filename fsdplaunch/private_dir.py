"""Folders that only this user can open, on this node's own disk or memory, for as long as their processes live.

Each is locked by who made it, and by the forks of that. The kernel takes the lock back when the last of these has
gone, however it went: whoever makes the next folder removes those that nobody has locked.
"""

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from fsdplaunch.run_secret import PRIVATE_DIR

_MEMORY = "/dev/shm"  # noqa: S108  (the folders made in it are 0700, with random names)
_PREFIX = "fsdplaunch-run-"
"""Older versions made folders without a lock, whose names begin with fsdplaunch- alone."""
_MOST_TRIES = 100
_ROOM = 1 << 20
"""Bytes that the file in which workers meet may come to."""
_locks: list[int] = []
"""Descriptors of this process's private folder."""


def make_private_dir(environ: MutableMapping[str, str]) -> None:
    """Make a folder (0700) and name it in the environment.

    In memory where that can be: the run's folder may stand on a file system that many nodes share, without locks.
    Where there is no room for a folder at all, nothing is named, and the workers meet as torch has them meet.
    """
    for parent in (_MEMORY, tempfile.gettempdir()):
        with suppress(OSError):
            folder, lock = _make_locked(parent)
            try:  # a container's memory for files is often small, or full
                with tempfile.TemporaryFile(dir=folder) as file:
                    os.posix_fallocate(file.fileno(), 0, _ROOM)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
                raise
            environ[PRIVATE_DIR] = folder
            _locks.append(lock)
            return


def remove_private_dir(environ: MutableMapping[str, str]) -> None:
    """Remove the folder, if there is one."""
    if (folder := environ.get(PRIVATE_DIR)) and os.path.basename(folder).startswith(_PREFIX):  # noqa: PTH119
        shutil.rmtree(folder, ignore_errors=True)


def leave_private_dir(environ: MutableMapping[str, str]) -> None:
    """Give up this process's part in the folder and its lock; those that were forked before keep theirs."""
    environ.pop(PRIVATE_DIR, "")
    while _locks:
        os.close(_locks.pop())


def make_process_dir() -> Path:
    """Return a new folder (0700), where other programs have theirs; it goes when this process ends."""
    folder, _ = _make_locked(tempfile.gettempdir())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def remove_abandoned_dirs(parent: str = _MEMORY) -> None:
    """Remove the folders that killed processes of this user's have left, in memory."""
    with suppress(OSError):
        for name in os.listdir(parent):  # noqa: PTH208  (thousands of others' files may stand there)
            folder = os.path.join(parent, name)  # noqa: PTH118
            if name.startswith(_PREFIX) and (lock := _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _make_locked(parent: str) -> tuple[str, int]:
    """Make a folder and return it with the descriptor that holds its lock, which forks share and execs close."""
    remove_abandoned_dirs(parent)
    for _ in range(_MOST_TRIES):
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        os.chmod(folder, stat.S_IRWXU)  # noqa: PTH101  (a umask may have taken its own bits, too)
        lock = _lock(folder, fcntl.LOCK_EX)
        if lock is not None:
            return folder, lock
    raise FileNotFoundError(parent)


def _lock(folder: str, how: int) -> int | None:
    """Return a descriptor that has locked a private folder of this user's; None for any other, or one removed.

    Between a folder's making and its locking another process may take it for abandoned, and remove it.
    """
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(descriptor, how)
        found = os.fstat(descriptor)
        is_private = found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == stat.S_IRWXU
        if is_private and os.path.samestat(found, os.lstat(folder)):
            return descriptor
    except OSError:
        pass
    if descriptor >= 0:
        os.close(descriptor)
    return None
