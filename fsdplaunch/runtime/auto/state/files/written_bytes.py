"""Have a file that all ranks open to write bytes be written by rank 0: a library's `model.save("agent.zip")`.

Each rank that opens it empties it, so one that is early would read less than it has written. A rank that is not
the first writes to a temporary file instead, and at the end waits until rank 0's is complete. Below the working
folder only, once a model is sharded, and where all ranks give the file one name: caches, locks and logs of
libraries are elsewhere, or have names of their own on each rank.
"""

import builtins
import functools
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.detect.import_scan import excludes_others, speaks_of_ranks
from fsdplaunch.runtime.auto.state.files import path_store
from fsdplaunch.runtime.auto.state.files.caught_errors import goes_on_after, is_foreign
from fsdplaunch.runtime.auto.state.files.written_files import OpenedFiles, is_hook, name_of_file, named
from fsdplaunch.runtime.auto.state.rank0.pulling import rank0_saves
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import is_user_file, script_line

_ARRIVAL_SECONDS = 5.0
"""How late rank 0 may be at a line; one that does not come there leaves the file to the others."""
_LOCKS = (".lock", ".lck", ".pid", ".sock")


@contextmanager
def writing_bytes_once(hook_context: HookContext) -> Iterator[None]:
    """Let rank 0 alone write what all ranks open to write bytes."""
    if hook_context.size == 1:
        yield
        return
    files = _WrittenBytes(hook_context)
    with ExitStack() as stack:
        for owner in (builtins, io):
            stack.enter_context(replaced(owner, "open", files.opening))
        yield


class _WrittenBytes(OpenedFiles):
    """The files of bytes, by the lines that open them."""

    def opening(self, original: Any) -> Any:
        """Return what stands for `open`."""

        @functools.wraps(original)
        def open_file(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            name = self._name(file, kwargs) if _writes_bytes(mode) else None
            line = None if name is None else _line()
            if name is None or line is None or ("x" in mode and goes_on_after(FileExistsError, sys._getframe(1))):
                return original(file, mode, *args, **kwargs)
            self.opened[line] += 1
            key = f"{path_store.key_of('bytes', line)}/{self.opened[line]}"
            if self.rank == 0:
                return self._written(original(file, mode, *args, **kwargs), file, name, key)
            if line in self.left or not self._is_rank_0s(key, name, line):
                return original(file, mode, *args, **kwargs)
            dropped = tempfile.TemporaryFile(mode if "+" in mode else mode.replace("x", "w"))  # noqa: SIM115
            done = f"{key}/closed"
            return named(dropped, os.fspath(file), lambda: path_store.wait_for_note(done))

        return open_file

    def _written(self, opened: Any, file: Any, name: str, key: str) -> Any:
        path_store.note(key, name)
        if not self.told:
            self.told = True
            messages.say(
                f"{script_line()}: rank 0 alone writes {os.path.relpath(name)} and other files of bytes that all"
                " ranks open: what the other ranks write to them is dropped"
            )
        return named(opened, os.fspath(file), lambda: path_store.note(f"{key}/closed"))

    def _is_rank_0s(self, key: str, name: str, line: str) -> bool:
        """Return whether rank 0 opens a file of this name, too, at the same line, as often."""
        if path_store.wait_for_note(key, _ARRIVAL_SECONDS):
            return path_store.noted(key) == name
        if path_store.answers():
            self.left.add(line)
        return False

    def _name(self, file: Any, kwargs: dict[str, Any]) -> str | None:
        """Return a path as all ranks have it; None for what is each rank's own."""
        if not isinstance(file, str | os.PathLike) or kwargs.get("opener") is not None:
            return None
        if self.ownership.ranked or not self.ownership.ours or rank0_saves() is None:
            return None
        if threading.current_thread() is not threading.main_thread() or not path_store.is_rank(self.process):
            return None
        if speaks_of_ranks() or excludes_others():
            return None
        name = name_of_file(file)
        return name if name is not None and _is_of_the_run(name) else None


def _writes_bytes(mode: Any) -> bool:
    return isinstance(mode, str) and "b" in mode and not set(mode).isdisjoint("wx")


def _is_of_the_run(name: str) -> bool:
    """Return whether a file is below the working folder, not hidden there, and no lock by its name."""
    try:
        parts = Path(name).relative_to(Path.cwd()).parts
    except (ValueError, OSError):
        return False
    return not any(part.startswith(".") for part in parts) and not name.endswith(_LOCKS)


def _line() -> str | None:
    """Return the line that opens a file, of the user or of a library that the user's code calls; None for others.

    Those of torch and of this package have files of ranks, or have rank 0 write already.
    """
    frame: FrameType | None = sys._getframe(2)
    found = None
    while frame is not None:
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        if module == "fsdplaunch.runtime.script" or module.startswith("torch."):
            return None
        if module.startswith("fsdplaunch.") and not is_hook(frame):
            return None
        if found is None and not is_foreign(file):
            found = f"{file}:{frame.f_lineno}"
        if is_user_file(file):
            return f"{found} of {file}:{frame.f_lineno}"
        frame = frame.f_back
    return None
