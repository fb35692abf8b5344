"""What importing has read, printed, changed and loaded: later launches must find it the same, or be given it.

Noted in the agent and in its fork server, where the run is to leave a warm interpreter.
"""

import os
import site
import sys
import tempfile
import time
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from contextlib import contextmanager, suppress
from typing import Any

from fsdplaunch.warm import has_say

_FileMark = tuple[int, int, int]  # time of change in ns, size and number of a file


class ImportRecord:
    """Notes of the imports of this process and those it was forked from; begins before anything is imported."""

    def __init__(self) -> None:
        self.environ_before = dict(os.environ)
        self.folder_before = os.getcwd()  # noqa: PTH109
        self._began_ns = time.time_ns()
        self._read: set[str] = set()
        self._printed: list[tuple[str, str]] = []
        self._changes: dict[str, tuple[str | None, str]] = {}
        self._files: dict[str, _FileMark] = {}
        self._folders: dict[str, frozenset[str]] = {}
        self._sites = _sites()
        self.temporary_folder: str | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the body's imports read, print, change and load."""
        before, plain = dict(os.environ), type(os.environ)
        tempfile.tempdir = None  # what asks for it now reads the variables, and that is noted
        streams = [(name, stream) for name in ("stdout", "stderr") if (stream := getattr(sys, name)) is not None]
        os.environ.__class__ = _noting_class(plain, self._read)
        for name, stream in streams:
            stream.write = self._noting_write(name, stream.write)
        try:
            yield
        finally:
            os.environ.__class__ = plain
            for _, stream in streams:
                with suppress(AttributeError):
                    del stream.write
            self.temporary_folder = self.temporary_folder or tempfile.tempdir
            after = dict(os.environ)
            self._changes |= {
                name: (before.get(name), now) for name, now in after.items() if before.get(name) != now
            }
            self._folders |= {folder: _names_in(folder) for folder in sys.path if folder not in self._folders}
            # Files that say by their content where packages are count as loaded ones.
            pairs = ((folder, name) for folder, names in self._folders.items() for name in names)
            links = {f"{folder}/{name}" for folder, name in pairs if name.endswith((".pth", ".egg-link"))}
            for path in _loaded_files() | links:
                if path not in self._files and (mark := _mark(path)) is not None:
                    self._files[path] = mark

    def _noting_write(self, name: str, write: Callable[[str], int]) -> Callable[[str], int]:
        def noting_write(text: str) -> int:
            self._printed.append((name, text))
            return write(text)

        return noting_write

    def obstacle(self, environ: Mapping[str, str]) -> str | None:
        """Return which of a new agent's variables would have let the imports come out otherwise, or None."""
        before = self.environ_before
        top = {name.partition(".")[0].upper() for name in sys.modules}
        named = {name for name in {*environ, *before} if name.partition("_")[0] in top}
        for name in filter(has_say, self._read | named):  # native ones are in the interpreter's own name
            if environ.get(name) != before.get(name):
                return f"the variable {name} differs"
        return None

    def change(self) -> str | None:
        """Return a file or folder of what was imported that has changed since; None where all are the same."""
        for path, mark in self._files.items():
            if mark[0] > self._began_ns or _mark(path) != mark:
                return f"{path} has changed"
        top = {name.partition(".")[0] for name in sys.modules}
        for path, found in _sites().items():
            if self._sites.get(path) != found:
                return f"{path} has changed"
        installed = (".dist-info", ".egg-info", ".egg-link", ".pth")
        for folder, names in self._folders.items():
            changed = names ^ _names_in(folder)  # what is installed there, or may be imported instead
            if any(name.endswith(installed) or name.partition(".")[0] in top for name in changed):
                return f"what is installed in {folder} has changed"
        return None

    def give_again(self) -> None:
        """Change the variables as importing did, and print what it printed."""
        for name, (old, new) in self._changes.items():
            if os.environ.get(name) == old:
                os.environ[name] = new
        for name, text in self._printed:
            stream: Any = getattr(sys, name)
            if stream is not None:
                stream.write(text)


def _noting_class(plain: type, read: set[str]) -> type:
    """Return a class of `os.environ` that notes the names that are looked up.

    Libraries that go through all variables look for those that begin with their own name, as tqdm does; these
    count anyway, and the others do not because of it.
    """

    class _Noting(plain):  # type: ignore[misc]
        def __getitem__(self, name: str) -> str:
            read.add(name)
            return str(super().__getitem__(name))

        def copy(self) -> dict[str, str]:
            return {name: str(super(_Noting, self).__getitem__(name)) for name in self}

        def items(self) -> ItemsView[str, str]:
            return self.copy().items()

        def values(self) -> ValuesView[str]:
            return self.copy().values()

    return _Noting


def _sites() -> dict[str, _FileMark | bool | None]:
    """Return what decides which folders of packages an interpreter knows at its start.

    The mark of a virtual environment's settings, and whether each folder of packages is there: one that is not,
    such as the user's own before the first `pip install --user`, is on no `sys.path`.
    """
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    settings = f"{sys.prefix}/pyvenv.cfg"
    return {settings: _mark(settings), **{folder: os.path.isdir(folder) for folder in folders}}  # noqa: PTH112


def _names_in(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return frozenset()


def _loaded_files() -> set[str]:
    found = {sys.executable}
    for module in list(sys.modules.values()):
        path = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(path, str):
            found.add(path)
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:  # noqa: PTH123
        mapped = (line[line.find("/") :].rstrip("\n") for line in maps)
        found |= {path for path in mapped if path.endswith(".so") or ".so." in path}
    return {path for path in found if path.startswith("/") and not path.endswith(" (deleted)")}


def _mark(path: str) -> _FileMark | None:
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
