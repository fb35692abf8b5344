"""Numbers on the command line, read as in the YAML file: no `1_0`, no digits of other scripts; with limits."""

from collections.abc import Callable
from typing import Any

import typer

from fsdplaunch.config.schema.parsers import parse_number, parse_whole
from fsdplaunch.terminal_text import quoted


def whole(least: int, most: int) -> Callable[[Any], int]:
    """Return a parser of whole numbers from `least` to `most`, for an option."""
    return _within(parse_whole, "a whole number", least, most)


def number(least: float, most: float) -> Callable[[Any], float]:
    """Return a parser of numbers from `least` to `most`, for an option."""
    return _within(parse_number, "a number", least, most)


def _within(parse: Callable[[Any], Any], kind: str, least: float, most: float) -> Callable[[Any], Any]:
    def parsed(value: Any) -> Any:
        try:
            found = parse(value)
        except (ValueError, OverflowError):
            found = None
        if found is None or not least <= found <= most:
            msg = f"{quoted(str(value))} is not {kind} from {least} to {most}"
            raise typer.BadParameter(msg)
        return found

    return parsed
