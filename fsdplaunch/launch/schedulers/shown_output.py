"""What other programs print on our terminal: without what steers it. Into a file or pipe it goes as it is."""

import os
import selectors
import subprocess
import time
from typing import IO, Any, TextIO

from fsdplaunch.terminal_text import TerminalFilter

_CHUNK = 1 << 16


def stream_for(screen: TextIO | None) -> int | None:
    """Return what a program's stream has to be, for `subprocess`, to be shown on a stream of ours.

    Returns:
        PIPE for a terminal, whose text is to be copied; None where the program itself may write there.
    """
    return subprocess.PIPE if screen is not None and screen.isatty() else None


class Screen:
    """A stream of ours that other programs' output is shown on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._filter = TerminalFilter() if stream.isatty() else None

    def write(self, data: bytes) -> None:
        """Show the next piece of one program's output."""
        self._put(data if self._filter is None else self._filter.part(data))

    def end(self) -> None:
        """Show what was held back, at the end of that output."""
        self._put(b"" if self._filter is None else self._filter.end())

    def _put(self, data: bytes) -> None:
        self._stream.flush()
        self._stream.buffer.write(data)
        self._stream.buffer.flush()


def copy_piece(source: IO[bytes], screen: Screen) -> bool:
    """Show the next piece of a program's output, once there is one; return whether more may come."""
    data = os.read(source.fileno(), _CHUNK)
    if data:
        screen.write(data)
    else:
        screen.end()
    return bool(data)


def copy_all(source: IO[bytes], screen: Screen) -> None:
    """Show a program's output until its end."""
    while copy_piece(source, screen):
        pass


class ShownStreams:
    """Streams of several programs, shown as they come; one thread looks after all."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, process: "subprocess.Popen[bytes]", **screens: TextIO) -> None:
        """Show what a program prints, where it was started with `stream_for`.

        Args:
            process: The program.
            screens: Where its `stdout`, `stderr` are shown.
        """
        for name, screen in screens.items():
            if (source := getattr(process, name)) is not None:
                self._selector.register(source, selectors.EVENT_READ, Screen(screen))

    def copy(self, seconds: float) -> None:
        """Show what comes within some seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._turn(left):
                time.sleep(left)

    def copy_all(self) -> None:
        """Show all that is still to come."""
        while self._turn(None):
            pass

    def _turn(self, seconds: float | None) -> bool:
        if not self._selector.get_map():
            return False
        for key, _ in self._selector.select(seconds):
            source: Any = key.fileobj
            if not copy_piece(source, key.data):
                self._selector.unregister(source)
                source.close()
        return True
