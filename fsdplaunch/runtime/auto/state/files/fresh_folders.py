"""Keep a rank that comes late from removing the folder that another one has made and writes to.

`if os.path.exists(out): shutil.rmtree(out)` empties a folder before a run. A rank that gets there when another has
made the new one would remove that, and what is in it: in one process the line has run before.
"""

import functools
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.detect.import_scan import speaks_of_ranks
from fsdplaunch.runtime.auto.state.files import path_store
from fsdplaunch.runtime.auto.state.files.caught_errors import goes_on_after
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import is_user_file


@contextmanager
def keeping_fresh_folders(hook_context: HookContext) -> Iterator[None]:
    """Let a removal of a folder by the script's own line pass over what another rank has made since.

    Not where the script looks at ranks: one of them may remove what another has made.
    """
    if hook_context.size == 1:
        yield
        return
    folders = _Folders(hook_context)
    with replaced(os, "mkdir", folders.making), replaced(shutil, "rmtree", folders.removing):
        yield


class _Folders:
    """What one rank knows of folders that were made since the run began.

    The store holds who made the folder that is at a path, by the number of its inode: it may be another by now.
    """

    def __init__(self, hook_context: HookContext) -> None:
        self.ownership = hook_context.ownership
        self.rank = str(hook_context.rank)
        self.process = os.getpid()
        self.reached: set[str] = set()
        """Paths at which this rank has been told to make a folder."""

    def making(self, original: Any) -> Any:
        """Return what stands for `os.mkdir`."""

        @functools.wraps(original)
        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            name = self._name(path, kwargs)
            if name is None or os.path.isdir(name):  # noqa: PTH112  (as pathlib itself calls this)
                return self._find(name, original, path, *args, **kwargs)
            with path_store.counted(f"{_key(name)}/making"):
                self._find(name, original, path, *args, **kwargs)
                path_store.note(_key(name), f"{os.stat(name).st_ino} {self.rank}")  # noqa: PTH116
            return None

        return mkdir

    def _find(self, name: str | None, original: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Make the folder, or find it made; what the script waits for is no such place."""
        try:
            original(path, *args, **kwargs)
        except FileExistsError:
            if name is None or goes_on_after(FileExistsError, sys._getframe(2)):
                raise
            self.reached.add(name)
            raise
        if name is not None:
            self.reached.add(name)

    def removing(self, original: Any) -> Any:
        """Return what stands for `shutil.rmtree`."""

        @functools.wraps(original)
        def rmtree(path: Any, *args: Any, **kwargs: Any) -> Any:
            name = self._name(path, kwargs)
            if name is None or not _by_user() or self.ownership.ranked or speaks_of_ranks():
                return original(path, *args, **kwargs)
            with path_store.turn(f"{_key(name)}/turn", self.rank):
                return None if self._is_fresh(name) else original(path, *args, **kwargs)

        return rmtree

    def _is_fresh(self, name: str) -> bool:
        """Return whether another rank has made the folder at a place that this one has not reached."""
        if name in self.reached:
            return False
        making = f"{_key(name)}/making"
        path_store.wait_until(lambda: path_store.count(making, 0) == 0)  # it is there before the store has it
        noted = path_store.noted(_key(name))
        if noted is None:
            return False
        inode, rank = noted.split()
        return os.path.isdir(name) and int(inode) == os.stat(name).st_ino and rank != self.rank  # noqa: PTH112, PTH116

    def _name(self, path: Any, kwargs: dict[str, Any]) -> str | None:
        """Return a path as the store has it; None for one from an open folder, or after the run."""
        if path_store.from_open_folder(kwargs) or not isinstance(path, str | bytes | os.PathLike):
            return None
        inside = path_store.is_rank(self.process) and path_store.answers()
        return os.path.abspath(os.fsdecode(path)) if inside else None  # noqa: PTH100


def _key(name: str) -> str:
    return path_store.key_of("folders", name)


def _by_user() -> bool:
    """Return whether the user's own line removes, and no library that may have its own way to share folders."""
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("fsdplaunch."):
        frame = frame.f_back
    return is_user_file(frame.f_code.co_filename)
