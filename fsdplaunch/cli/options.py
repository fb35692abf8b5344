"""Options that several commands take, and the numbers and sizes that options are given."""

from collections.abc import Callable
from typing import Any

import typer

from fsdplaunch.display_text import quoted
from fsdplaunch.errors import EXIT_USAGE, LaunchError


def script_argument(help_text: str) -> Any:
    """Return the argument of a command that runs a script; what follows the script belongs to it."""
    return typer.Argument(metavar="SCRIPT [ARGS]...", help=help_text, show_default=False)


def group(help_text: str, **more: Any) -> typer.Typer:
    """Make a group of commands: plain help, and errors as we say them."""
    return typer.Typer(help=help_text, rich_markup_mode=None, pretty_exceptions_enable=False, **more)


class OptionError(LaunchError):
    """An option's value is not a number or a size, or not one that can be meant; typer passes it on."""

    exit_code = EXIT_USAGE


def whole(option: str, least: int, most: int) -> Callable[[Any], int]:
    """Return a parser of whole numbers for an option."""
    return _within("parse_whole", option, "a whole number", least, most)


def number(option: str, least: float, most: float) -> Callable[[Any], float]:
    """Return a parser of numbers for an option."""
    return _within("parse_number", option, "a number", least, most)


def _within(parser: str, option: str, kind: str, least: float, most: float) -> Callable[[Any], Any]:
    def parsed(value: Any) -> Any:
        from fsdplaunch.config.schema import kinds  # --help reads no number

        parse: Callable[[Any], Any] = getattr(kinds, parser)
        shown = str(value) if len(str(value)) <= len(str(most)) else quoted(str(value))
        try:
            found = parse(value)
        except (ValueError, OverflowError):
            msg = f"{option} must be {kind}, got {quoted(str(value))}"
            raise OptionError(msg) from None
        if not least <= found <= most:
            limit = f"at least {least}" if found < least else f"at most {most}"
            msg = f"{option} must be {limit}, got {shown}"
            raise OptionError(msg)
        return found

    return parsed


_MOST_BYTES = 2**60
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def size(option: str) -> Callable[[Any], int]:
    """Return a parser of sizes for an option, such as `5GB`, `500 MB` or `2GiB`, in bytes."""

    def parsed(value: Any) -> int:
        from fsdplaunch.config.schema.kinds import check_digits  # --help reads no size

        word = str(value).strip().upper().replace(" ", "")
        digits = word.rstrip("KMGTIB")
        try:
            check_digits(digits)
            found = int(float(digits) * _UNITS[word[len(digits) :]])
        except (ValueError, KeyError, OverflowError):
            found = 0
        if not 0 < found <= _MOST_BYTES:
            msg = f"{option} {quoted(str(value))} is not a size"
            raise OptionError(msg, hint="write it as 5GB, 500MB or 2GiB")
        return found

    return parsed
