"""The kinds of value a key may have, and how loose spellings become the one we keep.

Every spelling accelerate accepts (numeric codes, `yes`, comma lists) and those that published guides print
(`full shard`, any case) end as one canonical Python value, so nothing after this file needs to know them.
Every parser raises ValueError for a value of another kind. Standard library only: this file runs in every worker
and in every command.
"""

import json
import math
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

TRUE_WORDS = frozenset({"y", "yes", "t", "true", "on", "1"})
MOST_SECONDS = 366 * 24 * 3600  # a year: more is a slip, and somewhere more than a clock can wait for
FALSE_WORDS = frozenset({"n", "no", "f", "false", "off", "0"})


class NotedValueError(ValueError):
    """A wrong value that the parser itself can describe best; its words are for the user."""


def _plain_name(value: Any) -> str:
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


def _check_digits(text: str) -> None:
    """Refuse with a ValueError what Python alone reads as a number: `1_0`, digits of other scripts."""
    if not text.isascii() or "_" in text:
        raise ValueError(text)


def _parse_whole(value: Any) -> int:
    if isinstance(value, str):
        _check_digits(value)
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
        _check_digits(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _parse_text(value: Any) -> str:
    """Read a text that an environment variable can carry: not blank, no NUL, encodable."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(value)
    text = str(value)
    text.encode()
    if not text.strip() or "\0" in text:
        raise ValueError(value)
    return text


def _parse_pattern(value: Any) -> str:
    """Read a regular expression; several are joined to one, which `alternatives` takes apart again."""
    if isinstance(value, list | tuple) and value:
        each = [_parse_pattern(item) for item in value]
        return each[0] if len(each) == 1 else "|".join(f"(?:{pattern})" for pattern in each)
    text = _parse_text(value)
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


def _parse_names(value: Any) -> tuple[str, ...]:
    """Read names; none holds a comma, so that a comma list can always carry them."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError(value)
    names = [name.strip() for item in items for name in item.split(",")]
    return tuple(_parse_text(name) for name in names if name)


def _parse_hosts(value: Any) -> tuple[str, ...]:
    """Read names of nodes; a missing one between commas is a shell variable that was not set."""
    names = value.split(",") if isinstance(value, str) and value.strip() else value or ()
    if isinstance(names, list | tuple) and not all(str(name).strip() for name in names):
        msg = f"must be names of nodes separated by commas, and {','.join(map(str, names))!r} has an empty one"
        raise NotedValueError(msg)
    return _parse_names(value)


def _parse_lines(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("[") else [value]
    if not isinstance(value, list | tuple):
        raise ValueError(value)
    return tuple(_parse_text(item) for item in value)


def parse_table(value: Any) -> dict[str, Any]:
    """Read a mapping with texts as names, or the same in JSON."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(value)
    return value


def _parse_variables(value: Any) -> dict[str, str]:
    """Read environment variables; true and false become lower-case words, an empty text is allowed."""
    variables = {}
    for name, item in parse_table(value).items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            msg = f"{name} cannot name an environment variable"
            raise NotedValueError(msg)
        try:
            variables[name] = item if item == "" else _parse_text(write(item) if isinstance(item, bool) else item)
        except ValueError:
            msg = f"{name} must be a string; write '' for an empty one"
            raise NotedValueError(msg) from None
    return variables


def _parse_plan(value: Any) -> dict[str, str]:
    plan = parse_table(value)
    if not all(isinstance(item, str) and item.strip() and name.strip() for name, item in plan.items()):
        raise ValueError(value)
    return {name.strip(): item.strip() for name, item in plan.items()}


def _parse_modules(value: Any) -> tuple[str, ...]:
    """Read module names; `none` carries the empty list through an environment variable."""
    names = () if value == "none" else _parse_names(value)
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(value)
    return names


def _parse_three_flags(value: Any) -> tuple[bool, bool, bool]:
    value = value.strip().strip("()[]") if isinstance(value, str) else value  # accelerate writes a tuple as text
    items = value.split(",") if isinstance(value, str) else [value] * 3 if isinstance(value, bool) else value
    if not isinstance(items, list | tuple):
        raise ValueError(value)
    first, second, third = items  # another length is a ValueError of its own
    return parse_flag(first), parse_flag(second), parse_flag(third)


def _all_or_listed(pattern: str) -> Callable[[Any], str]:
    """Return what reads `all`, or items that are separated by commas or listed, in the given order."""

    def parse(value: Any) -> str:
        if isinstance(value, str) and value.strip().lower() == "all":
            return "all"
        items = str(value).split(",") if isinstance(value, str | int) else value
        if not isinstance(items, list | tuple) or not items or isinstance(value, bool):
            raise ValueError(value)
        names = [str(item).strip() for item in items]
        names = names[:-1] if len(names) > 1 and not names[-1] else names  # CUDA reads `0,` as one GPU
        if not all(re.fullmatch(pattern, name) for name in names):
            raise ValueError(value)
        return ",".join(names)

    return parse


def _parse_node_range(value: Any) -> str:
    low, _, high = str(value).partition(":")
    first, last = _parse_whole(low), _parse_whole(high or low)
    if not 1 <= first <= last:
        raise ValueError(value)
    return f"{first}:{last}"


def _parse_settings(value: Any) -> dict[str, str]:
    if isinstance(value, str) and not value.startswith("{"):
        parts = [part.strip() for part in value.split(",")]
        if not all(re.fullmatch(r"[A-Za-z_]\w*=[^,]*", part) for part in parts):
            raise ValueError(value)
        value = dict(part.split("=", 1) for part in parts)
    return _parse_variables(value)


def _parse_metrics(value: Any) -> dict[str, str]:
    found = _parse_settings(value)
    if unknown := set(found) - {"jsonl", "tensorboard", "prometheus"}:
        msg = f"must name jsonl, tensorboard or prometheus, got {min(unknown)}"
        raise NotedValueError(msg)
    if empty := [name for name, place in found.items() if not place]:
        msg = f"must give {empty[0]} a value"
        raise NotedValueError(msg)
    port = found.get("prometheus", "1")
    if not (port.isdecimal() and 1 <= int(port) <= MAX_PORT):
        msg = f"prometheus must be a port, from 1 to {MAX_PORT}, got {port}"
        raise NotedValueError(msg)
    return found


def _parse_streams(value: Any) -> str:
    """Read torchrun's notation: 1 is stdout, 2 stderr, 3 both, 0 neither; for all local ranks, or `0:3,1:2`."""
    text = ",".join(f"{rank}:{code}" for rank, code in value.items()) if isinstance(value, dict) else str(value)
    text = text.replace(" ", "")
    if isinstance(value, bool) or not re.fullmatch(r"[0-3]|[0-9]{1,6}:[0-3](,[0-9]{1,6}:[0-3])*", text):
        raise ValueError(value)
    return text


_UNHANDLED = {"SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"}


def _parse_signals(value: Any) -> tuple[str, ...]:
    names = [name.upper() for name in _parse_names(value)]
    full = tuple(name if name.startswith("SIG") else f"SIG{name}" for name in names)
    if not full or not all(name in signal.Signals.__members__ and name not in _UNHANDLED for name in full):
        raise ValueError(value)
    return full


MAX_PORT, RENDEZVOUS_PORT = 65535, 29400
"""The second: where nodes meet when an endpoint names no port, as torchrun has it."""


def _parse_endpoint(value: Any) -> str:
    """Read HOST:PORT; a host with colons stands in brackets. Without a port, the one that torchrun takes."""
    text = _parse_text(value)
    if ":" not in text or text.endswith("]"):
        text = f"{text}:{RENDEZVOUS_PORT}"
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not bare or any(mark in host for mark in " /") or (":" in bare and bare == host):
        raise ValueError(value)
    if not 0 <= _parse_whole(port) <= MAX_PORT:
        raise ValueError(value)
    return f"{host}:{_parse_whole(port)}"


def join_endpoint(host: str, port: int) -> str:
    """Write HOST:PORT; a host with colons of its own stands in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value."""

    expects: str  # what a value must be, in words that complete "must be ..."
    # Turns a loose value into the canonical one; raises ValueError when it is none of this kind.
    parse: Callable[[Any], Any]
    # What JSON Schema says about values an editor should accept.
    schema: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[str, ...] = ()  # the canonical names, for kinds that have a list of them
    # Turns the canonical value into the text `parse` gives it back from, for an environment variable.
    write: Callable[[Any], str] = write
    verbatim: bool = False  # numbers of a file are handed to `parse` as they are spelled (`1.10` is not `1.1`)
    # Known values that cannot be honoured, upper case, or `*` for any other, and why.
    refused: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, value: Any) -> str | None:
        """Return why a value that accelerate knows cannot be honoured, or None when it is not such a value."""
        known = self.refused.get(_plain_name(value), self.refused.get("*"))
        return known if isinstance(value, str | int) else None


def whole(minimum: int, maximum: int | None = None, *, words: tuple[str, ...] = (), minus_one: Any = None) -> Kind:
    """Return a whole number within limits, both included, or one of some words; -1 may stand for `minus_one`."""

    def parse(value: Any) -> Any:
        word = value.strip().lower() if isinstance(value, str) else ""
        if word in words:
            return word
        number = _parse_whole(value)
        if number == -1 and minus_one is not None:
            return minus_one
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(value)
        return number

    schema: dict[str, Any] = {"type": "integer", "minimum": minimum if minus_one is None else -1}
    expects = f"a whole number, at least {minimum}"
    if maximum is not None:
        schema["maximum"] = maximum
        expects = f"a whole number from {minimum} to {maximum}"
    if words:
        schema = {"anyOf": [schema, {"enum": list(words)}]}
        expects += f", or {', '.join(words[:-1])}{' or ' if words[1:] else ''}{words[-1]}"
    return Kind(expects, parse, schema)


def one_of(
    names: Any, *, aliases: Mapping[str, str] | None = None, refused: Mapping[str, str] | None = None
) -> Kind:
    """Return a name in any case, with spaces or dashes, or its code: its place in the list, from 1.

    `names` is a `Literal[...]` in the order of accelerate's numeric codes. In upper case, `aliases` are further
    spellings with the name they mean, and `refused` known values that cannot be honoured, with the reason.
    """
    allowed = get_args(names)
    table = {_plain_name(name): name for name in allowed} | dict(aliases or {})
    if all(isinstance(name, str) for name in allowed):
        table = {str(code): name for code, name in enumerate(allowed, start=1)} | table

    def parse(value: Any) -> Any:
        if value is False and "NO" in table:
            return table["NO"]  # YAML 1.1 writers turn a bare no into false
        if isinstance(value, bool) or not isinstance(value, str | int) or _plain_name(value) not in table:
            raise ValueError(value)
        return table[_plain_name(value)]

    words = tuple(str(name) for name in allowed)
    schema: dict[str, Any] = {"enum": list(allowed)}
    if isinstance(allowed[0], str):
        schema = {"anyOf": [schema, {"type": "integer", "minimum": 1, "maximum": len(allowed)}]}
    return Kind("one of " + ", ".join(words), parse, schema, words, refused=refused or {})


_TEXT_SCHEMA = {"type": ["string", "number"]}
_FLAG_SCHEMA = {"anyOf": [{"type": "boolean"}, {"enum": ["yes", "no", "on", "off", "true", "false"]}]}
FLAG = Kind("true or false", parse_flag, _FLAG_SCHEMA)
WHOLE = whole(0)
COUNT = whole(1)
PORT = whole(0, MAX_PORT)


def _seconds(*, may_be_zero: bool) -> Kind:
    def parse(value: Any) -> float:
        number = parse_number(value)
        if number < 0 or (number == 0 and not may_be_zero):
            raise ValueError(value)
        if number > MOST_SECONDS:
            msg = f"must be at most {MOST_SECONDS} seconds (one year), got {number:.3g}"
            raise NotedValueError(msg)
        return number

    limit, words = ("minimum", ", at least 0") if may_be_zero else ("exclusiveMinimum", " above 0")
    return Kind(f"a number of seconds{words}", parse, {"type": "number", limit: 0, "maximum": MOST_SECONDS})


SECONDS, WAIT = _seconds(may_be_zero=False), _seconds(may_be_zero=True)
TEXT = Kind("text, not empty", _parse_text, _TEXT_SCHEMA, verbatim=True)
PATTERN = Kind(
    "a regular expression that Python can compile, or a list of them",
    _parse_pattern,
    {"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": {"type": "string"}}]},
    verbatim=True,
)
NAMES = Kind(
    "names separated by commas, or a list of names",
    _parse_names,
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    write=",".join,
    verbatim=True,
)
HOSTS = replace(NAMES, expects="names of nodes separated by commas, or a list of them", parse=_parse_hosts)
MODULES = replace(
    NAMES,
    expects="module names separated by commas, or a list of them",
    parse=_parse_modules,
    write=lambda value: ",".join(value) or "none",
)
SIGNALS = replace(
    NAMES, expects="signal names separated by commas, or a list of them", parse=_parse_signals, verbatim=False
)
LINES = Kind(
    "a list of strings",
    _parse_lines,
    {"type": "array", "items": _TEXT_SCHEMA},
    write=lambda value: write_json(list(value)),
    verbatim=True,
)
TABLE = Kind("a mapping of names to values", parse_table, {"type": "object"}, write=write_json)
VARIABLES = Kind(
    "a mapping of variable names to strings",
    _parse_variables,
    {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
    write=write_json,
    verbatim=True,
)
PLAN = replace(
    VARIABLES,
    expects="a mapping of names, with * for any one part, to styles such as colwise",
    parse=_parse_plan,
    schema={"type": "object", "additionalProperties": {"type": "string"}},
)
_NUMBERS_SCHEMA = {"type": ["string", "integer"]}
RANKS = Kind(
    "all, or rank numbers separated by commas", _all_or_listed(r"[0-9]{1,6}"), _NUMBERS_SCHEMA, verbatim=True
)
DEVICES = replace(
    RANKS,
    expects="all, or GPU numbers separated by commas",
    parse=_all_or_listed(r"[0-9]{1,6}|(GPU|MIG)-[0-9A-Za-z/-]+"),
)
THREE_FLAGS = Kind(
    "true or false for each of forward, data gradient and weight gradient",
    _parse_three_flags,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    write=lambda value: ",".join(map(write, value)),
)
NODE_RANGE = Kind("MIN:MAX, two whole numbers", _parse_node_range, _NUMBERS_SCHEMA, verbatim=True)
ENDPOINT = Kind("HOST:PORT", _parse_endpoint, {"type": "string"}, verbatim=True)
# accelerate writes -1 where it does not know.
WORKERS = whole(1, words=("auto",), minus_one="auto")
LOCAL_WORKERS = whole(1, words=("auto", "gpu", "cpu"), minus_one="auto")
MESH_SIZE = replace(whole(1, minus_one=-1), expects="a whole number, at least 1, or -1 for the rest")
SETTINGS = Kind(
    "name=value pairs separated by commas, or a mapping",
    _parse_settings,
    {"anyOf": [{"type": "string"}, VARIABLES.schema]},
    write=write_json,
    verbatim=True,
)
METRICS = replace(
    SETTINGS,
    expects="jsonl: FILE, tensorboard: FOLDER and prometheus: PORT, or some of these",
    parse=_parse_metrics,
)
STREAMS = Kind(
    "0, 1, 2 or 3, or RANK:NUMBER pairs separated by commas",
    _parse_streams,
    {"type": ["string", "integer", "object"]},
    verbatim=True,
)
StrategyName = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
WrapName = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
PrefetchName = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
StateDictName = Literal["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
PrecisionName = Literal["no", "fp16", "bf16", "fp8"]
DtypeName = Literal["fp32", "bf16", "fp16"]
DistributedName = Literal["NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "XLA"]
RendezvousName = Literal["static", "c10d"]
EnvironmentName = Literal["LOCAL_MACHINE"]
EventLogName = Literal["console"]
NumaName = Literal["node", "exclusive"]
ShardName = Literal["auto", "always", "explicit", "off"]
ContextName = Literal["allgather", "alltoall"]
ContextBackendName = Literal["torch"]
SequenceAttentionName = Literal["auto", "heads", "ring"]
SequenceBackendName = Literal["deepspeed"]
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
LocalWorkers = int | Literal["auto", "gpu", "cpu"]
Reshard = bool | int | StrategyName

_LONG_DTYPES = {"FLOAT32": "fp32", "BFLOAT16": "bf16", "FLOAT16": "fp16", "HALF": "fp16"}
VERSION = one_of(Literal[1, 2])
STRATEGY = one_of(StrategyName)
OPT_LEVEL = one_of(OptLevelName)
WRAP = one_of(WrapName, aliases={"SIZED_BASED_WRAP": "SIZE_BASED_WRAP"})
STATE_DICT = one_of(StateDictName)
PRECISION = one_of(PrecisionName, aliases=_LONG_DTYPES | {"FP32": "no", "FLOAT32": "no"})
DTYPE = one_of(DtypeName, aliases=_LONG_DTYPES)
RUNS_ON = "fsdplaunch runs on NVIDIA GPUs, CPUs and TPUs"
SPLIT_LAYERS = "split layers are FSDP with parallelism_config_tp_size"
_GONE = "torch no longer has it"
_ENGINES = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
_DEVICES = ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
DISTRIBUTED = one_of(
    DistributedName,
    aliases={"TPU": "XLA"},  # accelerate's older name
    refused={name: f"{engine} needs accelerate launch" for name, engine in _ENGINES.items()}
    | dict.fromkeys((*(f"MULTI_{name}" for name in _DEVICES), "MPS"), RUNS_ON)
    | dict.fromkeys(("DATA_PARALLEL", "MODEL_PARALLEL"), "SageMaker needs accelerate launch")
    | {"TP": SPLIT_LAYERS},  # accelerate 1.3 to 1.9
)
ENVIRONMENT = one_of(EnvironmentName, refused={"AMAZON_SAGEMAKER": "fsdplaunch starts processes on this machine"})
RENDEZVOUS = one_of(
    RendezvousName,
    refused=dict.fromkeys(
        ("ETCD", "ETCD_V2"), "etcd needs a server of its own; c10d needs none, and does the same"
    ),
)
CONTEXT_BACKEND = one_of(
    ContextBackendName, refused={"DEEPSPEED": "DeepSpeed needs accelerate launch; torch splits sequences here"}
)
FP8_BACKEND = one_of(Fp8BackendName, refused={"NO": "AO computes float8 here; leave the key out"})
DYNAMO = one_of(
    DynamoName,
    aliases={"TORHCHXLA_TRACE_ONCE": "TORCHXLA_TRACE_ONCE"},  # so spelt by accelerate's option
    refused={"NEURON": RUNS_ON} | dict.fromkeys(("NVFUSER", "AOT_NVFUSER", "AOT_CUDAGRAPHS"), _GONE),
)


def _parse_reshard(value: Any) -> bool | int | str:
    """Read a flag or a group size under FSDP2, a strategy's name or code under FSDP1."""
    if isinstance(value, bool):
        return value
    with suppress(ValueError):
        return int(WHOLE.parse(value))
    with suppress(ValueError):
        return parse_flag(value)
    return str(STRATEGY.parse(value))


RESHARD = Kind(
    "true, false, a number of ranks (FSDP2), or a sharding strategy's name (FSDP1)",
    _parse_reshard,
    {"anyOf": [{"type": "boolean"}, {"type": "integer"}, STRATEGY.schema]},
)
