"""Let what one rank did to a file or folder count for the others, which find it done.

Needed because every rank runs the script's lines: `os.makedirs(out)` fails on the second, and so does
`os.replace(part, path)` of a file that all have written. Done by a rank that came first, it is done: in one
process it would have been, too.
"""

import errno
import functools
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist

from fsdplaunch.runtime.auto.patch import replaced
from fsdplaunch.runtime.auto.state import file_operations
from fsdplaunch.runtime.collectives.hang_detector import store

_DONE = {
    "mkdir": errno.EEXIST,
    "symlink": errno.EEXIST,
    "rename": errno.ENOENT,
    "replace": errno.ENOENT,
    "remove": errno.ENOENT,
    "unlink": errno.ENOENT,
    "rmdir": errno.ENOENT,
}
"""What an operation fails with where it has been done."""

_ONCE = file_operations.__name__
_RECENT_SECONDS = 2.0
"""How long ago a folder must have changed for another rank to be at it."""
_PATIENCE_SECONDS = 1.0
"""How long that rank may take to say so."""


@contextmanager
def counting_for_all(size: int) -> Iterator[None]:
    """Let operations that another rank has done pass for done.

    Args:
        size: How many ranks there are.
    """
    with ExitStack() as stack:
        for name, code in _DONE.items() if size > 1 else ():
            stack.enter_context(replaced(os, name, _Operation(name, code).replace))
        yield


class _Operation:
    """One of them, on one rank."""

    def __init__(self, name: str, code: int) -> None:
        self.name, self.code = name, code
        self.own: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()
        self.process = os.getpid()

    def replace(self, original: Any) -> Any:
        """Return what stands for it."""

        @functools.wraps(original)
        def operate(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != self.process or not dist.is_initialized() or _by_libraries():
                return original(*args, **kwargs)
            key = self._key(args, kwargs)
            try:
                done = original(*args, **kwargs)
            except OSError as error:
                if key is None or error.errno != self.code or not self._done_elsewhere(key, args, kwargs):
                    raise
                return None
            if key is not None:
                self.own[key] += 1
                store().add(key, 1)
            return done

        return operate

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return where ranks of a run meet that do the same; None where it is told from an open folder."""
        given = [*args, *(kwargs[name] for name in ("src", "dst", "path") if name in kwargs)]
        paths = [os.fsdecode(each) for each in given if isinstance(each, str | bytes | os.PathLike)]
        if not paths or any(value is not None for name, value in kwargs.items() if name.endswith("dir_fd")):
            return None
        absolute = "\0".join(os.path.abspath(path) for path in paths)  # noqa: PTH100
        return f"fsdplaunch/files/{self.name}/{hashlib.sha256(absolute.encode()).hexdigest()[:24]}"

    def _done_elsewhere(self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether another rank has done it once more than this one has taken it for done."""
        path = os.fsdecode(args[0] if args else kwargs.get("path", kwargs.get("src", "")))
        path = os.fsdecode(args[1]) if self.name == "symlink" and len(args) > 1 else path
        until = time.monotonic() + (_PATIENCE_SECONDS if _just_changed(path) else 0)
        while store().add(key, 0) - self.own[key] <= self.taken[key]:
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)
        self.taken[key] += 1
        return True


def _by_libraries() -> bool:
    """Return whether torch or this package does it, whose files are each rank's own."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == _ONCE:
        frame = frame.f_back  # what stands before this one
    module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return module.startswith(("torch.", "fsdplaunch."))


def _just_changed(path: str) -> bool:
    """Return whether something was made in, or taken out of, a path's folder a moment ago."""
    try:
        changed = os.stat(os.path.dirname(os.path.abspath(path))).st_mtime  # noqa: PTH100, PTH116, PTH120
    except OSError:
        return False
    return abs(time.time() - changed) < _RECENT_SECONDS
