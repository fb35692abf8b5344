"""Other programs that start launchers, such as schedulers: what they are asked, and how what they print is shown.

On our terminal, what steers it is taken out of other programs' output; into a file or pipe it goes as it is.
"""

import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any, TextIO

from fsdplaunch.display_text import TerminalFilter
from fsdplaunch.errors import LaunchError, MachineError

_OWN_KEYS = ("machine_rank", "local_address", "launch.local_address")
_CHUNK = 1 << 16


def shared_overrides(overrides: Sequence[str]) -> list[str]:
    """Return those of the command line's overrides that hold for every node."""
    return [one for one in overrides if one.partition("=")[0].strip() not in _OWN_KEYS]


class LateError(LaunchError):
    """A scheduler has not answered in time."""


def ask(words: Sequence[str], *, text: str = "", seconds: float, missing: str, late: str, refused: str) -> str:
    """Run a scheduler's command and return what it prints; the hints are for one that is missing, late, failed."""
    name = words[0]
    if shutil.which(name) is None:
        msg = f"{name} was not found on this machine"
        raise MachineError(msg, hint=missing)
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        msg = f"{name} has not answered within {seconds:.0f} s"
        raise LateError(msg, hint=late) from None
    if done.returncode:
        answer = " ".join(done.stderr.split())[-400:] or f"exit code {done.returncode}"
        msg = f"{name} refused: {answer}"
        raise LaunchError(msg, hint=refused)
    return done.stdout


def stream_for(screen: TextIO | None) -> int | None:
    """Return what a program's stream is to be to be shown on ours: a pipe for a terminal, or else itself there."""
    return subprocess.PIPE if screen is not None and screen.isatty() else None


class Screen:
    """A stream of ours that other programs' output is shown on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._filter = TerminalFilter() if stream.isatty() else None

    def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Show the next piece of one program's output, and at its end what was held back."""
        if self._filter is not None:
            data = self._filter.part(data, is_last=is_last)
        self._stream.flush()
        self._stream.buffer.write(data)
        self._stream.buffer.flush()


class ShownStreams:
    """Streams of several programs, shown as they come, without threads."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, process: "subprocess.Popen[bytes]", **screens: TextIO) -> None:
        """Show what a program that was started with `stream_for` prints, its `stdout`, `stderr` on these."""
        for name, screen in screens.items():
            if (source := getattr(process, name)) is not None:
                self._selector.register(source, selectors.EVENT_READ, Screen(screen))

    def copy(self, seconds: float | None = None) -> None:
        """Show all that is still to come, or what comes of it within some seconds."""
        end = None if seconds is None else time.monotonic() + seconds
        while self._selector.get_map() and (end is None or time.monotonic() < end):
            for key, _ in self._selector.select(None if end is None else end - time.monotonic()):
                source: Any = key.fileobj
                data = os.read(source.fileno(), _CHUNK)
                key.data.write(data, is_last=not data)
                if not data:
                    self._selector.unregister(source)
                    source.close()

    def pause(self, seconds: float) -> None:
        """Let some seconds pass, and show what comes meanwhile."""
        end = time.monotonic() + seconds
        self.copy(seconds)
        time.sleep(max(0.0, end - time.monotonic()))
