"""The kinds of value a key may have, and how loose spellings become the one we keep.

Every spelling accelerate accepts (numeric codes, `yes`, comma lists) and those that published guides print
(`full shard`, any case) end as one canonical Python value, so nothing after this file needs to know them.
Standard library only: this file runs in every worker and in every command.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

TRUE_WORDS = frozenset({"y", "yes", "t", "true", "on", "1"})
FALSE_WORDS = frozenset({"n", "no", "f", "false", "off", "0"})


def plain_name(value: Any) -> str:
    """The one spelling of a name: upper case, words joined by underscores."""
    return str(value).strip().upper().replace(" ", "_").replace("-", "_")


def _write(value: Any) -> str:
    """Write a scalar as accelerate and torch read it: `true`, `2`, `1e-05`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def _write_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


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
    write: Callable[[Any], str] = _write
    verbatim: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, value: Any) -> str | None:
        """Why a value that accelerate knows cannot be honoured, or None when it is not such a value."""
        return self.refused.get(plain_name(value)) if isinstance(value, str) else None


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
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _parse_text(value: Any) -> str:
    """Text that an environment variable can carry: not blank, no NUL, encodable."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(value)
    text = str(value)
    text.encode()
    if not text.strip() or "\0" in text:
        raise ValueError(value)
    return text


def _parse_pattern(value: Any) -> str:
    text = _parse_text(value)
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        raise ValueError(value) from None
    return text


def _parse_names(value: Any) -> tuple[str, ...]:
    """Names never hold a comma, so that a comma list can always carry them."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError(value)
    names = [name.strip() for item in items for name in item.split(",")]
    return tuple(_parse_text(name) for name in names if name)


def _parse_lines(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("[") else [value]
    if not isinstance(value, list | tuple):
        raise ValueError(value)
    return tuple(_parse_text(item) for item in value)


def _parse_table(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(value)
    return value


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _parse_variables(value: Any) -> dict[str, str]:
    """Environment variables; true and false become lower-case words, an empty text is allowed."""
    table = _parse_table(value)
    if not all(_VARIABLE.fullmatch(name) for name in table):
        raise ValueError(value)
    return {name: "" if item == "" else _parse_text(_word(item)) for name, item in table.items()}


def _word(value: Any) -> Any:
    return _write(value) if isinstance(value, bool) else value


def _parse_ranks(value: Any) -> str:
    """`all`, or numbers separated by commas."""
    if isinstance(value, str) and value.strip().lower() == "all":
        return "all"
    items = str(value).split(",") if isinstance(value, str | int) else value
    if not isinstance(items, list | tuple) or not items or isinstance(value, bool):
        raise ValueError(value)
    ranks = [_parse_whole(item) for item in items]
    if min(ranks) < 0:
        raise ValueError(value)
    return ",".join(map(str, ranks))


_DEVICE = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+")


def _parse_devices(value: Any) -> str:
    """`all`, or indices or NVML names separated by commas, in the given order."""
    if isinstance(value, str) and value.strip().lower() == "all":
        return "all"
    items = str(value).split(",") if isinstance(value, str | int) else value
    if not isinstance(items, list | tuple) or not items or isinstance(value, bool):
        raise ValueError(value)
    names = [str(item).strip() for item in items]
    if not all(_DEVICE.fullmatch(name) for name in names):
        raise ValueError(value)
    return ",".join(names)


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
    """A number from 1, or auto; accelerate writes -1 where it does not know."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    number = _parse_whole(value)
    if number == -1:
        return "auto"
    if number < 1:
        raise ValueError(value)
    return number


def _parse_mesh_size(value: Any) -> int:
    number = _parse_whole(value)
    if number < 1 and number != -1:
        raise ValueError(value)
    return number


def whole(minimum: int, maximum: int | None = None) -> Kind:
    """A whole number within limits, both included."""

    def parse(value: Any) -> int:
        number = _parse_whole(value)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(value)
        return number

    limits: dict[str, Any] = {"type": "integer", "minimum": minimum}
    if maximum is None:
        return Kind(f"a whole number, at least {minimum}", parse, limits)
    return Kind(f"a whole number from {minimum} to {maximum}", parse, limits | {"maximum": maximum})


def _parse_modules(value: Any) -> tuple[str, ...]:
    """Module names; `none` carries the empty list through an environment variable."""
    names = () if value == "none" else _parse_names(value)
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(value)
    return names


def _write_modules(value: tuple[str, ...]) -> str:
    return ",".join(value) or "none"


def _parse_three_flags(value: Any) -> tuple[bool, bool, bool]:
    items = value.split(",") if isinstance(value, str) else [value] * 3 if isinstance(value, bool) else value
    if not isinstance(items, list | tuple):
        raise ValueError(value)
    first, second, third = items  # another length is a ValueError of its own
    return _parse_flag(first), _parse_flag(second), _parse_flag(third)


def _parse_node_range(value: Any) -> str:
    low, _, high = str(value).partition(":")
    first, last = _parse_whole(low), _parse_whole(high or low)
    if not 1 <= first <= last:
        raise ValueError(value)
    return f"{first}:{last}"


def _parse_endpoint(value: Any) -> str:
    """HOST:PORT; a host with colons of its own stands in brackets."""
    host, colon, port = _parse_text(value).rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not bare or any(mark in host for mark in " /") or (":" in bare and bare == host):
        raise ValueError(value)
    return f"{host}:{PORT.parse(port)}"


def _parse_seconds(value: Any) -> float:
    number = _parse_number(value)
    if number <= 0:
        raise ValueError(value)
    return number


def _parse_wait(value: Any) -> float:
    number = _parse_number(value)
    if number < 0:
        raise ValueError(value)
    return number


def one_of(
    names: Any, *, aliases: Mapping[str, str] | None = None, refused: Mapping[str, str] | None = None
) -> Kind:
    """A name in any case, with spaces or dashes, or its code: its place in the list, from 1.

    Args:
        names: A `Literal[...]` of strings or ints, in the order of accelerate's numeric codes.
        aliases: Further spellings, upper case, and the name they mean.
        refused: Known values that cannot be honoured, upper case, and why.
    """
    allowed = get_args(names)
    table = {plain_name(name): name for name in allowed} | dict(aliases or {})
    if all(isinstance(name, str) for name in allowed):
        table = {str(code): name for code, name in enumerate(allowed, start=1)} | table

    def parse(value: Any) -> Any:
        if value is False and "NO" in table:
            return table["NO"]  # YAML 1.1 writers turn a bare no into false
        if isinstance(value, bool) or not isinstance(value, str | int) or plain_name(value) not in table:
            raise ValueError(value)
        return table[plain_name(value)]

    words = tuple(str(name) for name in allowed)
    return Kind("one of " + ", ".join(words), parse, {"enum": list(allowed)}, words, refused=refused or {})


_TEXT_SCHEMA = {"type": ["string", "number"]}
_LIST_SCHEMA = {"type": "array", "items": {"type": ["string", "number"]}}
FLAG = Kind("true or false", _parse_flag, {"type": "boolean"})
WHOLE = whole(0)
COUNT = whole(1)
PORT = whole(0, 65535)
NUMBER = Kind("a number", _parse_number, {"type": "number"})
SECONDS = Kind("a number of seconds above 0", _parse_seconds, {"type": "number", "exclusiveMinimum": 0})
WAIT = Kind("a number of seconds, at least 0", _parse_wait, {"type": "number", "minimum": 0})
TEXT = Kind("text, not empty", _parse_text, _TEXT_SCHEMA, verbatim=True)
PATTERN = Kind("a regular expression that Python can compile", _parse_pattern, _TEXT_SCHEMA, verbatim=True)
NAMES = Kind(
    "names separated by commas, or a list of names",
    _parse_names,
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    write=",".join,
    verbatim=True,
)
LINES = Kind(
    "a list of texts", _parse_lines, _LIST_SCHEMA, write=lambda value: _write_json(list(value)), verbatim=True
)
TABLE = Kind("a mapping of names to values", _parse_table, {"type": "object"}, write=_write_json)
VARIABLES = Kind(
    "a mapping of variable names to texts",
    _parse_variables,
    {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
    write=_write_json,
    verbatim=True,
)
RANKS = Kind(
    "all, or rank numbers separated by commas", _parse_ranks, {"type": ["string", "integer"]}, verbatim=True
)
DEVICES = Kind(
    "all, or GPU numbers separated by commas", _parse_devices, {"type": ["string", "integer"]}, verbatim=True
)
MODULES = Kind(
    "module names separated by commas, or a list of them",
    _parse_modules,
    NAMES.schema,
    write=_write_modules,
    verbatim=True,
)
THREE_FLAGS = Kind(
    "true or false for each of forward, data gradient and weight gradient",
    _parse_three_flags,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    write=lambda value: ",".join(map(_write, value)),
)
NODE_RANGE = Kind("MIN:MAX, two whole numbers", _parse_node_range, {"type": ["string", "integer"]}, verbatim=True)
ENDPOINT = Kind("HOST:PORT", _parse_endpoint, {"type": "string"}, verbatim=True)
WORKERS = Kind(
    "a whole number, at least 1, or auto", _parse_workers, {"anyOf": [{"type": "integer"}, {"const": "auto"}]}
)
MESH_SIZE = Kind(
    "a whole number, at least 1, or -1 for the rest", _parse_mesh_size, {"type": "integer", "minimum": -1}
)

StrategyName = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
WrapName = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
PrefetchName = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
StateDictName = Literal["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
PrecisionName = Literal["no", "fp16", "bf16", "fp8"]
DtypeName = Literal["fp32", "bf16", "fp16"]
DistributedName = Literal["NO", "MULTI_CPU", "MULTI_GPU", "FSDP"]
RendezvousName = Literal["static", "c10d"]
EnvironmentName = Literal["LOCAL_MACHINE"]
NumaName = Literal["node", "socket", "exclusive", "core-complex"]
KubernetesName = Literal["job", "trainjob"]
ContextName = Literal["allgather", "alltoall"]
ContextBackendName = Literal["torch"]
SequenceBackendName = Literal["deepspeed"]
AttentionName = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"]
Fp8BackendName = Literal["AO", "TE", "MSAMP"]
Fp8FormatName = Literal["HYBRID", "E4M3", "E5M2"]
AmaxName = Literal["max", "most_recent"]
OptLevelName = Literal["O1", "O2"]
DynamoName = Literal[
    "NO",
    "EAGER",
    "AOT_EAGER",
    "INDUCTOR",
    "AOT_TS_NVFUSER",
    "NVPRIMS_NVFUSER",
    "CUDAGRAPHS",
    "OFI",
    "FX2TRT",
    "ONNXRT",
    "TENSORRT",
    "AOT_TORCHXLA_TRACE_ONCE",
    "TORCHXLA_TRACE_ONCE",
    "IPEX",
    "TVM",
    "HPU_BACKEND",
]
DynamoModeName = Literal["default", "reduce-overhead", "max-autotune"]
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
_ENGINES = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "PyTorch/XLA", "TPU": "PyTorch/XLA"}
_DEVICES = ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
DISTRIBUTED = one_of(
    DistributedName,
    refused={name: f"{engine} needs accelerate launch" for name, engine in _ENGINES.items()}
    | {f"MULTI_{name}": "fsdplaunch runs on NVIDIA GPUs and CPUs" for name in _DEVICES},
)
ENVIRONMENT = one_of(EnvironmentName, refused={"AMAZON_SAGEMAKER": "fsdplaunch starts processes on this machine"})
RENDEZVOUS = one_of(RendezvousName)
NUMA = one_of(NumaName)
KUBERNETES = one_of(KubernetesName)
CONTEXT = one_of(ContextName)
CONTEXT_BACKEND = one_of(ContextBackendName)
SEQUENCE_BACKEND = one_of(SequenceBackendName)
ATTENTION = one_of(AttentionName)
FP8_BACKEND = one_of(Fp8BackendName)
FP8_FORMAT = one_of(Fp8FormatName)
AMAX = one_of(AmaxName)
OPT_LEVEL = one_of(OptLevelName)
DYNAMO = one_of(DynamoName)
DYNAMO_MODE = one_of(DynamoModeName)
RESHARD = Kind(
    "true, false, a number of ranks (version 2), or a sharding strategy's name (version 1)",
    _parse_reshard,
    {"anyOf": [{"type": "boolean"}, {"type": "integer"}, STRATEGY.schema]},
)
