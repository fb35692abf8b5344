"""One run writes into a folder of checkpoints: a launch locks it at its first save, until its process ends.

Outside of a launch nobody knows where a run ends, and the lock is held during each save.
"""

import atexit
import os
from contextlib import suppress
from pathlib import Path

from fsdplaunch.checkpoint.folder_lock import FolderLock
from fsdplaunch.config.environment import RUN_DIR

_IN_ROOT = ".lock"
_held: dict[str, FolderLock] = {}


def lock_for_run(target: Path, root: Path) -> None:
    """Keep other runs from saving there from now on.

    The file that is locked stands in the folder of numbered checkpoints, which may be a mounted disk; beside one
    that is replaced as a whole.

    Args:
        target: What is written: `root`, or a numbered checkpoint in it.
        root: The folder that was configured, which exists when it is not the target.

    Raises:
        CheckpointError: Another process holds it; with its node and its number.
    """
    place = _place(target, root)
    if place in _held:
        return
    folder = Path(os.path.realpath(root))
    lock = FolderLock(folder, None if target == root else folder / _IN_ROOT)
    lock.acquire()
    _held[place] = lock


def end_save(target: Path, root: Path) -> None:
    """Let others save there again, unless this process is a worker of a launch, which may save again."""
    if RUN_DIR not in os.environ and (lock := _held.pop(_place(target, root), None)):
        lock.release()


def is_locked(target: Path, root: Path) -> bool:
    """Return whether this process keeps others out."""
    return _place(target, root) in _held


def _place(target: Path, root: Path) -> str:
    return os.path.realpath(root) + ("" if target == root else os.sep)


def _release_all() -> None:
    while _held:
        with suppress(OSError):  # the folder may have gone meanwhile
            _held.popitem()[1].release()


def _leave_to_parent() -> None:
    while _held:
        _held.popitem()[1].forget()


atexit.register(_release_all)
os.register_at_fork(after_in_child=_leave_to_parent)
