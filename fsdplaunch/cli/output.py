"""The one way to print: data to stdout, our talk and errors to stderr, colour only on a terminal."""

import json
import os
import sys
from typing import Any

from fsdplaunch.errors import LaunchError

_RED, _YELLOW, _DIM, _RESET = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"


class Output:
    """Where a command's words go."""

    def __init__(self) -> None:
        wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.colour = wanted and sys.stderr is not None and sys.stderr.isatty()
        self.quiet = bool(os.environ.get("CI"))  # no live display into a log that only looks like a terminal

    def data(self, text: str) -> None:
        """Print the command's data, to stdout."""
        print(text, flush=True)

    def json(self, value: Any) -> None:
        """Print one JSON value to stdout."""
        self.data(json.dumps(value, indent=2, ensure_ascii=False))

    def say(self, text: str) -> None:
        """Tell the user something, on stderr."""
        print(text, file=sys.stderr, flush=True)

    def live(self, text: str) -> None:
        """Show a line that the next one replaces, on a terminal; an empty one takes it away."""
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def ask(self, text: str) -> None:
        """Show a question on stderr; the answer goes on the same line."""
        print(text, end="", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Tell the user something that may surprise, on stderr."""
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
        return f"{code}{text}{_RESET}" if self.colour else text
