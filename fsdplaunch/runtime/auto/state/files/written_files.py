"""Have a text file that a script for one process opens to write be written by rank 0 alone.

Every rank runs the script's lines: a log that all append to would have each line once per rank, the second rank to
create a file would fail, and one that is late would remove what another has written since.
"""

import builtins
import functools
import io
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.detect.import_scan import excludes_others, speaks_of_ranks
from fsdplaunch.runtime.auto.state.files import path_store
from fsdplaunch.runtime.auto.state.files.caught_errors import goes_on_after, is_foreign
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import is_user_file, script_line

_PATIENCE_SECONDS = 5.0
"""How late rank 0 may be at a line; one that does not come there leaves the file to the others."""
_REMEMBERED = 1000
"""How many openings of one file are kept in the store: another rank may be as far behind as that."""
_HOOKS = str(Path(__file__).parent)


@contextmanager
def writing_once(hook_context: HookContext) -> Iterator[None]:
    """Let rank 0 write what the script opens as text; not where the script looks at ranks, or locks files."""
    if hook_context.size == 1:
        yield
        return
    files = _WrittenFiles(hook_context)
    with ExitStack() as stack:
        for owner in (builtins, io):
            stack.enter_context(replaced(owner, "open", files.opening))
        for name in ("remove", "unlink"):
            stack.enter_context(replaced(os, name, files.removing))
        yield


class OpenedFiles:
    """What one rank knows of files that are opened to write.

    Attributes:
        ownership: Who shards.
        rank: This one.
        process: The rank's own.
        opened: How many openings there were, the same on all ranks: they run the same lines.
        left: Lines at which rank 0 did not open what this rank did.
        told: Whether it was printed that rank 0 alone writes.
    """

    def __init__(self, hook_context: HookContext) -> None:
        self.ownership = hook_context.ownership
        self.rank = hook_context.rank
        self.process = os.getpid()
        self.opened: Counter[str] = Counter()
        self.left: set[str] = set()
        self.told = False


class _WrittenFiles(OpenedFiles):
    """The files that the script opens, by their paths."""

    def opening(self, original: Any) -> Any:
        """Return what stands for `open`."""

        @functools.wraps(original)
        def open_file(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            writes = isinstance(mode, str) and not set(mode).isdisjoint("wax")
            name = self._name(file) if writes else None
            if name is None or ("x" in mode and goes_on_after(FileExistsError, sys._getframe(1))):
                return original(file, mode, *args, **kwargs)
            self.opened[name] += 1
            key = _key(name, self.opened[name])

            def make() -> Any:
                with self._turn(name):
                    return _open(original, key, file, mode, args, kwargs)

            if not set(mode).isdisjoint("b+"):
                return make()
            if self.rank and self._rank_0_opens(key):
                dropped = original(os.devnull, mode.replace("x", "w"), *args, **kwargs)
                return named(
                    dropped, os.fspath(file), lambda: path_store.wait_for_note(f"{key}/closed", _PATIENCE_SECONDS)
                )
            return self._written(make(), name, key)

        return open_file

    def removing(self, original: Any) -> Any:
        """Return what stands for `os.remove`: it leaves what another rank has made after this line."""

        @functools.wraps(original)
        def remove(path: Any, *args: Any, **kwargs: Any) -> None:
            name = None if path_store.from_open_folder(kwargs) else self._name(path)
            if name is None:
                original(path, *args, **kwargs)
                return
            with self._turn(name):
                if not path_store.is_noted(_key(name, self.opened[name] + 1)):
                    original(path, *args, **kwargs)

        return remove

    def _turn(self, name: str) -> AbstractContextManager[None]:
        """Keep what one rank makes here from being removed by one that has seen the file before it."""
        return path_store.turn(f"{path_store.key_of('written', name)}/turn", str(self.rank))

    def _written(self, opened: Any, name: str, key: str) -> Any:
        if self.rank:
            return opened
        path_store.note(f"{key}/0")
        if self.opened[name] > _REMEMBERED:
            _forget(_key(name, self.opened[name] - _REMEMBERED))
        if not self.told:
            self.told = True
            messages.say(
                f"{script_line()}: rank 0 alone writes {os.path.relpath(name)} and other text files that the"
                " script opens: what the other ranks write to them is dropped"
            )
        return named(opened, opened.name, lambda: path_store.note(f"{key}/closed"))

    def _rank_0_opens(self, key: str) -> bool:
        """Return whether rank 0 has opened it, or does so soon."""
        line = script_line()
        if line in self.left:
            return False
        if not path_store.wait_for_note(f"{key}/0", _PATIENCE_SECONDS):
            self.left.add(line)
        return line not in self.left

    def _name(self, path: Any) -> str | None:
        """Return a path as the store has it; None for what is not opened by the user's line, or is its own."""
        if not isinstance(path, str | bytes | os.PathLike) or not path_store.is_rank(self.process):
            return None
        if not _by_user() or self.ownership.ranked or speaks_of_ranks() or excludes_others():
            return None
        return name_of_file(path)


def name_of_file(path: Any) -> str | None:
    """Return a path as all ranks have it; None for what is no file, such as a device, or after the run."""
    name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
    is_file = os.path.isfile(name) or not os.path.exists(name)  # noqa: PTH110, PTH113
    return name if is_file and path_store.answers() else None


def _open(original: Any, key: str, file: Any, mode: str, args: Any, kwargs: Any) -> Any:
    """Open a file in earnest; one that must not be there may be another rank's, who was first."""
    try:
        opened = original(file, mode, *args, **kwargs)
    except FileExistsError:
        if not path_store.is_noted(key):
            raise
        opened = original(file, mode.replace("x", "w"), *args, **kwargs)
    path_store.note(key)
    return opened


def named(opened: Any, name: Any, then: Callable[[], Any]) -> Any:
    """Give an open file a name, and call something when it is closed, also where nothing refers to it.

    Args:
        opened: Of text, of bytes, or without a buffer.
        name: The name.
        then: What to call.
    """
    buffer = getattr(opened, "buffer", opened)
    raw = getattr(buffer, "raw", buffer)
    known, process = weakref.ref(raw), os.getpid()

    def close() -> None:
        here = known()
        if here is None or here.closed:
            return
        io.FileIO.close(here)
        if path_store.is_rank(process):
            then()

    raw.name, raw.close = name, close
    return opened


def _forget(key: str) -> None:
    """Remove what is known of an opening; a log that is opened at every step would fill the store's memory."""
    path_store.forget(key, f"{key}/0", f"{key}/closed")


def _key(name: str, number: int) -> str:
    return f"{path_store.key_of('written', name)}/{number}"


def _by_user() -> bool:
    """Return whether the user's own line opens or removes it, by Python's own modules or not: no library."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and is_foreign(frame.f_code.co_filename):
        if str(frame.f_globals.get("__name__", "")).startswith("fsdplaunch.") and not is_hook(frame):
            return False
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def is_hook(frame: FrameType) -> bool:
    """Return whether a frame is of a function that stands for one of Python's."""
    return str(Path(frame.f_code.co_filename).parent) == _HOOKS
