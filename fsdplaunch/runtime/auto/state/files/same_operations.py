"""Let what one rank did to a file or folder count for the others, which find it done.

Needed because every rank runs the script's lines: `os.makedirs(out)` fails on the second, and so does
`os.replace(part, path)` of a file that all have written. Done by a rank that came first at the same line, it is
done: in one process it would have been, too.

An error that the script catches, and goes on after, is left to it: that is how ranks wait for a lock, or take a
file each.
"""

import errno
import functools
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fsdplaunch.runtime.auto.state.files import file_operations, path_store
from fsdplaunch.runtime.auto.state.files.caught_errors import goes_on_after
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line

_FAILURES = {errno.EEXIST: FileExistsError, errno.ENOENT: FileNotFoundError}
_DONE = (
    *((os, name, errno.EEXIST) for name in ("mkdir", "symlink", "link")),
    *((os, name, errno.ENOENT) for name in ("rename", "replace", "remove", "unlink", "rmdir")),
    *((shutil, name, errno.ENOENT) for name in ("rmtree", "move")),
)
"""What an operation fails with where it has been done."""

_DONE_ONCE = 1 << 32
"""What one that has been done adds to its count; one that is under way adds 1 as long."""
_FOLDER_MAKERS = (os.makedirs.__code__, Path.mkdir.__code__)
"""What makes a folder that may be there, if told so."""


@contextmanager
def counting_for_all(size: int) -> Iterator[None]:
    """Let operations that another rank has done pass for done.

    Args:
        size: How many ranks there are.
    """
    with ExitStack() as stack:
        for owner, name, code in _DONE if size > 1 else ():
            stack.enter_context(replaced(owner, name, _Operation(name, code).replace))
        yield


class _Operation:
    """One of them, on one rank."""

    def __init__(self, name: str, code: int) -> None:
        self.name, self.code = name, code
        self.calls: Counter[str] = Counter()
        self.process = os.getpid()

    def replace(self, original: Any) -> Any:
        """Return what stands for it."""

        @functools.wraps(original)
        def operate(*args: Any, **kwargs: Any) -> Any:
            if not path_store.is_rank(self.process) or _by_libraries() or _may_exist():
                return original(*args, **kwargs)
            caught = goes_on_after(_FAILURES[self.code], sys._getframe(1))
            key = None if caught else self._key(args, kwargs)
            if key is None:
                return original(*args, **kwargs)
            path_store.count(key, 1)
            try:
                done = original(*args, **kwargs)
            except BaseException as error:
                path_store.count(key, -1)
                if getattr(error, "errno", None) != self.code or not _done_elsewhere(key):
                    raise
                return args[1] if self.name == "move" and len(args) > 1 else None
            path_store.count(key, _DONE_ONCE - 1)
            return done

        return operate

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return where ranks meet whose call this is; None where the path is from an open folder."""
        given = [*args, *(kwargs[name] for name in ("src", "dst", "path") if name in kwargs)]
        paths = [os.fsdecode(each) for each in given if isinstance(each, str | bytes | os.PathLike)]
        if not paths or path_store.from_open_folder(kwargs):
            return None
        call = "\0".join((script_line(), *(os.path.abspath(path) for path in paths)))  # noqa: PTH100
        self.calls[call] += 1
        return f"{path_store.key_of(f'files/{self.name}', call)}/{self.calls[call]}"


def _done_elsewhere(key: str) -> bool:
    """Return whether another rank has done it.

    Each is counted before it begins, so there is nothing to wait for where none is under way.
    """

    def nothing_to_wait_for() -> bool:
        done, under_way = divmod(path_store.count(key, 0), _DONE_ONCE)
        return bool(done) or not under_way

    path_store.wait_until(nothing_to_wait_for)
    return path_store.count(key, 0) >= _DONE_ONCE


def _by_libraries() -> bool:
    """Return whether torch or this package does it, whose files are each rank's own."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _module(frame) == file_operations.__name__:  # stands between the script and this
        frame = frame.f_back
    return frame is not None and _module(frame).startswith(("torch.", "fsdplaunch."))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _may_exist() -> bool:
    """Return whether a folder is made that may be there: its caller takes the failure for done, at once."""
    caller = sys._getframe(2)
    return caller.f_code in _FOLDER_MAKERS and bool(caller.f_locals.get("exist_ok"))
