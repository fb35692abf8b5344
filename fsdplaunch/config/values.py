"""The kinds of value a key may have, and how loose spellings become the one we keep.

Every spelling accelerate accepts (numeric codes, `yes`, comma lists) and those that published guides print
(`full shard`, any case) end as one canonical Python value, so nothing after this file needs to know them.
Standard library only: this file runs in every worker and in every command.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

TRUE_WORDS = frozenset({"y", "yes", "t", "true", "on", "1"})
FALSE_WORDS = frozenset({"n", "no", "f", "false", "off", "0"})


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Attributes:
        expects: What a value must be, in words that complete "must be ...".
        parse: Turns a loose value into the canonical one; raises ValueError when it is none of this kind.
        schema: What JSON Schema says about values an editor should accept.
        choices: The canonical names, for kinds that have a list of them.
    """

    expects: str
    parse: Callable[[Any], Any]
    schema: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[str, ...] = ()


def _parse_flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int):
        text = str(value).strip().lower()
        if text in TRUE_WORDS:
            return True
        if text in FALSE_WORDS:
            return False
    raise ValueError(value)


def _parse_whole(value: Any) -> int:
    if isinstance(value, str):
        value = float(value) if any(mark in value for mark in ".eE") else int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return value


def _parse_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    return float(value)


def _parse_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(value)
    return str(value)


def _parse_names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list | tuple) or not all(isinstance(item, str | int) for item in value):
        raise ValueError(value)
    return tuple(name for name in (str(item).strip() for item in value) if name)


def _parse_lines(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("[") else [value]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str | int | float) for item in value):
        raise ValueError(value)
    return tuple(str(item) for item in value)


def _parse_table(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(value)
    return value


def _parse_reshard(value: Any) -> bool | int | str:
    """A flag or a group size under FSDP2, a strategy's name or code under FSDP1."""
    if isinstance(value, bool):
        return value
    with suppress(ValueError):
        return _parse_whole(value)
    with suppress(ValueError):
        return _parse_flag(value)
    return str(STRATEGY.parse(value))


def _parse_workers(value: Any) -> int | str:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    return _parse_whole(value)


def one_of(names: Any, *, aliases: Mapping[str, str] | None = None) -> Kind:
    """A name in any case, with spaces or dashes, or its code: its place in the list, from 1.

    Args:
        names: A `Literal[...]` of strings or ints, in the order of accelerate's numeric codes.
        aliases: Further spellings, upper case, and the name they mean.
    """
    allowed = get_args(names)
    table = {str(name).upper(): name for name in allowed} | dict(aliases or {})
    if all(isinstance(name, str) for name in allowed):
        table = {str(code): name for code, name in enumerate(allowed, start=1)} | table

    def parse(value: Any) -> Any:
        if value is False and "NO" in table:
            return table["NO"]  # YAML 1.1 writers turn a bare no into false
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(value)
        word = str(value).strip().upper().replace(" ", "_").replace("-", "_")
        if word not in table:
            raise ValueError(value)
        return table[word]

    words = tuple(str(name) for name in allowed)
    return Kind("one of " + ", ".join(words), parse, {"enum": list(allowed)}, words)


FLAG = Kind("true or false", _parse_flag, {"type": "boolean"})
WHOLE = Kind("a whole number", _parse_whole, {"type": "integer"})
NUMBER = Kind("a number", _parse_number, {"type": "number"})
TEXT = Kind("text", _parse_text, {"type": ["string", "number"]})
NAMES = Kind(
    "names separated by commas, or a list of names",
    _parse_names,
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
)
LINES = Kind("a list of texts", _parse_lines, {"type": "array", "items": {"type": ["string", "number"]}})
TABLE = Kind("a mapping of names to values", _parse_table, {"type": "object"})
WORKERS = Kind("a whole number, or auto", _parse_workers, {"anyOf": [{"type": "integer"}, {"const": "auto"}]})

StrategyName = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
WrapName = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
PrefetchName = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
StateDictName = Literal["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
PrecisionName = Literal["no", "fp16", "bf16", "fp8"]
DtypeName = Literal["fp32", "bf16", "fp16"]
DistributedName = Literal["NO", "MULTI_CPU", "MULTI_GPU", "FSDP"]
RendezvousName = Literal["static", "c10d"]
Workers = int | Literal["auto"]
Reshard = bool | int | StrategyName

_LONG_DTYPES = {"FLOAT32": "fp32", "BFLOAT16": "bf16", "FLOAT16": "fp16", "HALF": "fp16"}
VERSION = one_of(Literal[1, 2])
STRATEGY = one_of(StrategyName)
WRAP = one_of(WrapName, aliases={"SIZED_BASED_WRAP": "SIZE_BASED_WRAP"})
PREFETCH = one_of(PrefetchName)
STATE_DICT = one_of(StateDictName)
PRECISION = one_of(PrecisionName, aliases=_LONG_DTYPES | {"FP32": "no", "FLOAT32": "no"})
DTYPE = one_of(DtypeName, aliases=_LONG_DTYPES)
DISTRIBUTED = one_of(DistributedName)
RENDEZVOUS = one_of(RendezvousName)
RESHARD = Kind(
    "true, false, a number of ranks (version 2), or a sharding strategy's name (version 1)",
    _parse_reshard,
    {"anyOf": [{"type": "boolean"}, {"type": "integer"}, STRATEGY.schema]},
)
