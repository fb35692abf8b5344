"""The one way to print: data to stdout, our talk, progress and errors to stderr, colour only on a terminal.

What could steer a terminal is escaped here, whoever wrote it. Only `json` is exact.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fsdplaunch.display_text import one_line, printable, size_words
from fsdplaunch.errors import LaunchError

_RED, _YELLOW, _DIM, _RESET = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"


class Output:
    """Where a command's words go."""

    def __init__(self) -> None:
        wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.colour = wanted and sys.stderr is not None and sys.stderr.isatty()
        # Stands for the escape character of our own colours until a line is printed; nobody can guess it.
        self._mark = f"<{os.urandom(8).hex()}>"
        self.quiet = bool(os.environ.get("CI"))  # no live display into a log that only looks like a terminal

    def data(self, text: str) -> None:
        """Print the command's data, to stdout."""
        print(self._safe(text), flush=True)

    def json(self, value: Any, *, indent: int | None = 2) -> None:
        """Print one JSON value to stdout, with nothing in it changed; without an indent, in one line."""
        text = json.dumps(value, indent=indent, ensure_ascii=False)
        # What no encoding can print, and what a terminal would act on, is escaped as JSON itself escapes.
        print(text if printable(text) == text else json.dumps(value, indent=indent), flush=True)

    def say(self, text: str) -> None:
        """Print a line on stderr."""
        print(self._safe(text), file=sys.stderr, flush=True)

    def live(self, text: str) -> None:
        """Show a line that the next one replaces, on a terminal; an empty one takes it away."""
        print(f"\r\x1b[K{self._safe(text)}", end="", file=sys.stderr, flush=True)

    def ask(self, text: str) -> None:
        """Show a question on stderr; the answer goes on the same line."""
        print(self._safe(text), end="", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Print a note on stderr: something that may surprise."""
        self.say(f"{self._paint('note:', _YELLOW)} {text}")

    def error(self, error: LaunchError) -> None:
        """Print an error and its hint, on stderr."""
        self.say(error.message if error.located else f"{self._paint('error:', _RED)} {error.message}")
        if error.hint:
            self.say(f"{self._paint('hint:', _YELLOW)}  {error.hint}")

    def failure(self, lines: list[str]) -> None:
        """Print a report whose first line is the finding."""
        self.say(f"{self._paint('error:', _RED)} {lines[0]}")
        for line in lines[1:]:
            self.say(line)

    def dim(self, text: str) -> str:
        """Return text in a quieter colour, on a terminal."""
        return self._paint(text, _DIM)

    def _paint(self, text: str, code: str) -> str:
        begin, end = (each.replace("\x1b", self._mark) for each in (code, _RESET))
        return f"{begin}{text}{end}" if self.colour else text

    def _safe(self, text: str) -> str:
        """Return text as it may be printed, with our own colours in it."""
        return printable(text).replace(self._mark, "\x1b")


LINE_SECONDS, LIVE_SECONDS = 10.0, 0.2
"""Between two lines about progress: in a log, and on a terminal, where each takes the place of the one before."""


@contextmanager
def byte_progress(out: Output) -> Iterator[Callable[[str, int, int, str], None]]:
    """Show on stderr how far a transfer is, until the block ends: phase, bytes done, bytes in all, and of what."""
    live = sys.stderr.isatty() and not out.quiet
    start = last = time.monotonic()

    def update(phase: str, done: int, total: int, item: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < (LIVE_SECONDS if live else LINE_SECONDS):
            return
        last, rate = now, done / (now - start)
        left = f", {size_words(rate)}/s, {(total - done) / rate:.0f} s left" if rate else ""
        amount = f"{100 * done // max(total, 1)}%  {size_words(done)} of {size_words(total)}{left}"
        line = f"  {phase} {amount}  {one_line(item)}"
        out.live(line[: shutil.get_terminal_size().columns - 1]) if live else out.say(line)

    yield update
    if live:
        out.live("")
