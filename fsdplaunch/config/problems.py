"""What is wrong with a configuration, and what is worth a note, each with its place."""

from collections.abc import Iterable
from dataclasses import dataclass

from fsdplaunch.errors import EXIT_USAGE, LaunchError

TEXT_PROBLEMS = {
    "no-file": "The file does not exist or cannot be read.",
    "too-large": "The file is larger, or its aliases stand for more values, than any configuration needs.",
    "too-deep": "The file is nested deeper than any configuration needs.",
    "not-utf-8": "The file is not UTF-8.",
    "syntax": "The file is not YAML, or holds more than one document.",
    "not-a-mapping": "The file, or a section, does not consist of `key: value` lines.",
    "not-a-key": "A key is a list or a mapping.",
    "duplicate-key": "A key is set twice, under one spelling or two.",
    "unknown-key": "There is no such key.",
    "misplaced-key": "The key belongs to another section.",
    "not-an-assignment": "A text on the command line is not `KEY=VALUE`.",
    "wrong-value": "The key does not take this value.",
    "unsupported-value": "accelerate knows the value, but fsdplaunch cannot honour it.",
}
"""The ids of problems that a text, a name or a single value can have; those of key combinations are rules."""

TEXT_NOTES = {
    "other-spelling": "The key is spelled differently than in the reference.",
    "former-place": "The key is where older files have it.",
    "bare-section": "The file consists of one section's keys, without its name.",
    "follows": "A key follows another one, which a higher layer sets.",
    "variable-of-accelerate": "A variable that accelerate reads sets a key that the file leaves open.",
    "unread-variable": "An environment variable's name is close to that of a key.",
    "option-without-effect": "An option of accelerate or torchrun changes nothing in this run.",
}
"""The ids of notes about a text, a name or an option; those about key combinations are rules."""
MOST_SHOWN = 100  # how many problems a command shows: a file of another kind has thousands


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPosition:
    """Where a value is set: a file as the user named it, `env NAME` or `command line`; lines from 1."""

    source: str = ""
    line: int | None = None
    col: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}:{self.col}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a configuration, or one that is worth a note."""

    id: str  # the stable name of what was violated, for example `unknown-key`
    key: str  # the dotted key, or "" when it is the whole text's
    message: str  # what is wrong, with the value; lower case, no full stop
    hint: str | None = None  # what to do, or None
    place: TextPosition = TextPosition()  # where; nowhere for a value that is not set

    def __str__(self) -> str:
        text = f"{self.as_note()} [{self.id}]"
        return f"{text}\n    hint: {self.hint}" if self.hint else text

    def as_note(self) -> str:
        """Return one line: place, key and message."""
        return ": ".join(filter(None, [str(self.place), self.key, self.message]))

    def as_json(self) -> dict[str, str | int | None]:
        """Return what a program wants to know, for `--json`."""
        return {
            "id": self.id,
            "key": self.key,
            "message": self.message,
            "hint": self.hint,
            "file": self.place.source or None,
            "line": self.place.line,
            "col": self.place.col,
        }


class ConfigError(LaunchError):
    """A configuration is wrong. Holds every problem that was found, and what else is worth a note."""

    exit_code = EXIT_USAGE
    located = True

    def __init__(self, problems: Iterable[Problem], *, notes: tuple[Problem, ...] = ()) -> None:
        self.problems, self.notes = in_order(problems), notes
        count = f"{len(self.problems)} problem" + ("" if len(self.problems) == 1 else "s")
        more = f"; the first {MOST_SHOWN} are shown" if len(self.problems) > MOST_SHOWN else ""
        super().__init__("\n".join([*map(str, self.problems[:MOST_SHOWN]), count + more]))


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return problems or notes in the order of their places, the file's first."""

    def order(problem: Problem) -> tuple[bool, str, int, int]:
        place = problem.place
        return place.line is None, place.source, place.line or 0, place.col or 0

    return tuple(sorted(problems, key=order))
