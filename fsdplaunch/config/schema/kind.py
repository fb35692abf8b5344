"""A kind of value, and the two that take limits or a list of names. Standard library only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from fsdplaunch.config.schema import parsers as p


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Attributes:
        expects: What a value must be, in words that complete "must be ...".
        parse: Turns a loose value into the canonical one; raises ValueError when it is none of this kind.
        schema: What JSON Schema says about values an editor should accept.
        choices: The canonical names, for kinds that have a list of them.
        write: Turns the canonical value into the text `parse` gives it back from, for an environment variable.
        verbatim: Numbers of a file are handed to `parse` as they are spelled (`1.10` is not `1.1`).
        refused: Known values that cannot be honoured, upper case, and why.
    """

    expects: str
    parse: Callable[[Any], Any]
    schema: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    write: Callable[[Any], str] = p.write
    verbatim: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, value: Any) -> str | None:
        """Return why a value that accelerate knows cannot be honoured, or None when it is not such a value."""
        return self.refused.get(p.plain_name(value)) if isinstance(value, str) else None


def whole(minimum: int, maximum: int | None = None) -> Kind:
    """Return a whole number within limits, both included."""

    def parse(value: Any) -> int:
        number = p.parse_whole(value)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(value)
        return number

    limits: dict[str, Any] = {"type": "integer", "minimum": minimum}
    if maximum is None:
        return Kind(f"a whole number, at least {minimum}", parse, limits)
    return Kind(f"a whole number from {minimum} to {maximum}", parse, limits | {"maximum": maximum})


def one_of(
    names: Any, *, aliases: Mapping[str, str] | None = None, refused: Mapping[str, str] | None = None
) -> Kind:
    """Return a name in any case, with spaces or dashes, or its code: its place in the list, from 1.

    Args:
        names: A `Literal[...]` of strings or ints, in the order of accelerate's numeric codes.
        aliases: Further spellings, upper case, and the name they mean.
        refused: Known values that cannot be honoured, upper case, and why.
    """
    allowed = get_args(names)
    table = {p.plain_name(name): name for name in allowed} | dict(aliases or {})
    if all(isinstance(name, str) for name in allowed):
        table = {str(code): name for code, name in enumerate(allowed, start=1)} | table

    def parse(value: Any) -> Any:
        if value is False and "NO" in table:
            return table["NO"]  # YAML 1.1 writers turn a bare no into false
        if isinstance(value, bool) or not isinstance(value, str | int) or p.plain_name(value) not in table:
            raise ValueError(value)
        return table[p.plain_name(value)]

    words = tuple(str(name) for name in allowed)
    schema: dict[str, Any] = {"enum": list(allowed)}
    if isinstance(allowed[0], str):
        schema = {"anyOf": [schema, {"type": "integer", "minimum": 1, "maximum": len(allowed)}]}
    return Kind("one of " + ", ".join(words), parse, schema, words, refused=refused or {})
