"""`fsdplaunch tune` inside a worker, whose steps are measured as in any run: keep its writes apart, and end it.

What the script writes stays in the folder of its run, which is made of links to the user's files. A file that is
opened for writing there is first made a copy; a path anywhere else is refused before anything is written, except
temporary files and caches. Python's audit events come before every such call; torch and safetensors write some
files from C++ and Rust and are asked as well. What a program does that the script starts is not seen.
"""

import os
import shutil
import site
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import torch as safe

from fsdplaunch.config.environment import MEASURE_SCRATCH, MEASURE_SOURCE
from fsdplaunch.runtime.check_run import stop_after

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FIRST, _SECOND, _BOTH = slice(0, 1), slice(1, 2), slice(0, 2)
_EVENTS = {
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate"), _FIRST),
    **{"os.rename": _BOTH, "os.link": _SECOND, "os.symlink": _SECOND},  # what a link leads to is only read
}
"""Events of calls that change a folder, and which of their arguments are the paths that change."""


class WriteRefusedError(PermissionError):
    """A measured script was about to write outside of its folder."""


class WriteGuard:
    """Where a measured script may write: `scratch` and `free` folders, but nothing else in the user's `source`."""

    def __init__(self, scratch: str, source: str, free: tuple[str, ...]) -> None:
        self._scratch, self._source = os.path.realpath(scratch), os.path.realpath(source)
        self._free = tuple(map(os.path.realpath, free))
        self._copies = False

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Look at one audit event, and refuse it where it is about to write where nothing may be written."""
        if event == "open":
            if isinstance(args[2], int) and args[2] & _WRITES:
                self.before_write(args[0])
        elif event in _EVENTS and not self._copies:
            for path in args[_EVENTS[event]]:
                exists = event == "os.mkdir" and not isinstance(path, int) and Path(os.fsdecode(path)).is_dir()
                if not isinstance(path, int) and not exists:  # exist_ok: nothing happens
                    self._check_folder(os.fsdecode(path))

    def before_write(self, path: Any) -> None:
        """Make a link in the scratch folder a copy, or refuse a path outside."""
        if self._copies or not isinstance(path, str | bytes | os.PathLike):
            return
        text = os.fsdecode(path)
        self._check_folder(text)
        if Path(text).is_symlink() and not self._may_write(os.path.realpath(text)):
            self._copies = True
            try:
                part = f"{text}.{os.getpid()}"  # other ranks may do the same meanwhile
                shutil.copyfile(text, part)
                os.replace(part, text)  # noqa: PTH105  (a text all the way)
            finally:
                self._copies = False

    def _check_folder(self, text: str) -> None:
        folder, name = os.path.split(Path.cwd() / text)
        if not self._may_write(f"{os.path.realpath(folder)}{os.sep}{name}"):
            msg = f"{text} is outside the folder that a measured run may write to"
            raise WriteRefusedError(msg)

    def _may_write(self, real: str) -> bool:
        if _is_in(real, self._scratch):
            return True
        return not _is_in(real, self._source) and any(_is_in(real, folder) for folder in self._free)


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def measure(steps: int) -> None:
    """End the script that is about to run after so many steps of the optimizer that steps most."""
    scratch, source = os.environ.get(MEASURE_SCRATCH), os.environ.get(MEASURE_SOURCE)
    if scratch and source:
        # Keep the script's writes in its scratch folder; caches and temporary files are free.
        caches = [
            value for name, value in os.environ.items() if name.endswith(("_CACHE", "_CACHE_DIR", "_CACHE_HOME"))
        ]
        caches += [os.environ[name] for name in ("HF_HOME", "TORCH_HOME") if os.environ.get(name)]
        caches += [str(path) for path in Path.home().glob(".*") if path.is_dir()]
        python = (sys.prefix, *site.getsitepackages())
        temporary = (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev", "/proc")  # noqa: S108
        guard = WriteGuard(scratch, source, (*temporary, *python, *caches))
        sys.addaudithook(guard.audit)

        def asking(write: Callable[..., Any]) -> Callable[..., Any]:
            def ask_and_write(*args: Any, **kwargs: Any) -> Any:
                guard.before_write(args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename")))
                return write(*args, **kwargs)

            return ask_and_write

        for owner, name in ((torch, "save"), (safe, "serialize_file")):
            setattr(owner, name, asking(getattr(owner, name)))
    stop_after(steps, lambda _optimizer: {})
