"""Loose values -> canonical ones: one parser per kind of value, and the texts that carry them.

Every parser raises ValueError for a value of another kind. Standard library only.
"""

import json
import math
import re
from typing import Any

TRUE_WORDS = frozenset({"y", "yes", "t", "true", "on", "1"})
MOST_SECONDS = 366 * 24 * 3600
"""A year: more is a slip, and somewhere more than a clock can wait for."""
FALSE_WORDS = frozenset({"n", "no", "f", "false", "off", "0"})


class NotedValueError(ValueError):
    """A wrong value that the parser itself can describe best; its words are for the user."""


def plain_name(value: Any) -> str:
    """Return the one spelling of a name: upper case, words joined by underscores."""
    return str(value).strip().upper().replace(" ", "_").replace("-", "_")


def write(value: Any) -> str:
    """Write a scalar as accelerate and torch read it: `true`, `2`, `1e-05`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def write_json(value: Any) -> str:
    """Write lists and mappings as JSON."""
    return json.dumps(value, sort_keys=True)


def parse_flag(value: Any) -> bool:
    """Read a flag, in any of the words accelerate takes for one."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int):
        text = str(value).strip().lower()
        if text in TRUE_WORDS:
            return True
        if text in FALSE_WORDS:
            return False
    raise ValueError(value)


def check_digits(text: str) -> None:
    """Refuse what Python reads as a number and no YAML file means as one: `1_0`, digits of other scripts.

    Raises:
        ValueError: It is such a text.
    """
    if not text.isascii() or "_" in text:
        raise ValueError(text)


def parse_whole(value: Any) -> int:
    """Read a whole number; `1e8` is one."""
    if isinstance(value, str):
        check_digits(value)
        value = float(value) if any(mark in value for mark in ".eE") else int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return value


def parse_number(value: Any) -> float:
    """Read a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    if isinstance(value, str):
        check_digits(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def parse_text(value: Any) -> str:
    """Read a text that an environment variable can carry: not blank, no NUL, encodable."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(value)
    text = str(value)
    text.encode()
    if not text.strip() or "\0" in text:
        raise ValueError(value)
    return text


def parse_pattern(value: Any) -> str:
    """Read a regular expression; several are joined to one, which `alternatives` takes apart again."""
    if isinstance(value, list | tuple) and value:
        each = [parse_pattern(item) for item in value]
        return each[0] if len(each) == 1 else "|".join(f"(?:{pattern})" for pattern in each)
    text = parse_text(value)
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        msg = f"{text} is not a regular expression: {error}"
        raise NotedValueError(msg) from None
    return text


def alternatives(pattern: str) -> list[str]:
    """Return the expressions that a joined one was made of; any other one alone."""
    if not (pattern.startswith("(?:") and pattern.endswith(")")):
        return [pattern]
    parts = pattern[3:-1].split(")|(?:")
    try:
        for part in parts:
            re.compile(part)
    except re.error:
        return [pattern]
    return parts


def parse_names(value: Any) -> tuple[str, ...]:
    """Read names; none holds a comma, so that a comma list can always carry them."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError(value)
    names = [name.strip() for item in items for name in item.split(",")]
    return tuple(parse_text(name) for name in names if name)


def parse_hosts(value: Any) -> tuple[str, ...]:
    """Read names of nodes; a missing one between commas is a shell variable that was not set."""
    names = value.split(",") if isinstance(value, str) and value.strip() else value or ()
    if isinstance(names, list | tuple) and not all(str(name).strip() for name in names):
        msg = f"must be names of nodes separated by commas, and {','.join(map(str, names))!r} lacks one"
        raise NotedValueError(msg)
    return parse_names(value)


def parse_lines(value: Any) -> tuple[str, ...]:
    """Read texts: a list, one text, or a list in JSON."""
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("[") else [value]
    if not isinstance(value, list | tuple):
        raise ValueError(value)
    return tuple(parse_text(item) for item in value)


def parse_table(value: Any) -> dict[str, Any]:
    """Read a mapping with texts as names, or the same in JSON."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(value)
    return value


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_variables(value: Any) -> dict[str, str]:
    """Read environment variables; true and false become lower-case words, an empty text is allowed."""
    return {_variable_name(name): _variable_text(name, item) for name, item in parse_table(value).items()}


def _variable_name(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        msg = f"{name} cannot name an environment variable"
        raise NotedValueError(msg)
    return name


def _variable_text(name: str, value: Any) -> str:
    try:
        return "" if value == "" else parse_text(write(value) if isinstance(value, bool) else value)
    except ValueError:
        msg = f"{name} must be a text; '' is the empty one"
        raise NotedValueError(msg) from None


def parse_plan(value: Any) -> dict[str, str]:
    """Read names of modules, with `*` for any one part, and a style for each."""
    plan = parse_table(value)
    if not all(isinstance(item, str) and item.strip() and name.strip() for name, item in plan.items()):
        raise ValueError(value)
    return {name.strip(): item.strip() for name, item in plan.items()}


def parse_modules(value: Any) -> tuple[str, ...]:
    """Read module names; `none` carries the empty list through an environment variable."""
    names = () if value == "none" else parse_names(value)
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(value)
    return names


def write_modules(value: tuple[str, ...]) -> str:
    """Return what `parse_modules` reads back."""
    return ",".join(value) or "none"


def parse_three_flags(value: Any) -> tuple[bool, bool, bool]:
    """Read three flags, or one for all three."""
    value = value.strip().strip("()[]") if isinstance(value, str) else value  # accelerate writes a tuple as text
    items = value.split(",") if isinstance(value, str) else [value] * 3 if isinstance(value, bool) else value
    if not isinstance(items, list | tuple):
        raise ValueError(value)
    first, second, third = items  # another length is a ValueError of its own
    return parse_flag(first), parse_flag(second), parse_flag(third)


def parse_seconds(value: Any) -> float:
    """Read a number above 0, of seconds."""
    number = parse_wait(value)
    if number <= 0:
        raise ValueError(value)
    return number


def parse_wait(value: Any) -> float:
    """Read a number of seconds, at least 0 and at most a year."""
    number = parse_number(value)
    if number < 0:
        raise ValueError(value)
    if number > MOST_SECONDS:
        msg = f"must be at most {MOST_SECONDS} seconds, one year, and is {number:.3g}"
        raise NotedValueError(msg)
    return number
