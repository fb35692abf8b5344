"""The kinds of value a key may have, and how loose spellings become the one we keep.

Every spelling accelerate accepts (numeric codes, `yes`, comma lists) and those that published guides print
(`full shard`, any case) end as one canonical Python value, so nothing after this file needs to know them.
Standard library only: this file runs in every worker and in every command.
"""

from contextlib import suppress
from typing import Any, Literal

from fsdplaunch.config.schema import endpoints
from fsdplaunch.config.schema import launch_parsers as lp
from fsdplaunch.config.schema import parsers as p
from fsdplaunch.config.schema.kind import Kind, one_of, whole

_TEXT_SCHEMA = {"type": ["string", "number"]}
_LIST_SCHEMA = {"type": "array", "items": {"type": ["string", "number"]}}
_FLAG_SCHEMA = {"anyOf": [{"type": "boolean"}, {"enum": ["yes", "no", "on", "off", "true", "false"]}]}
FLAG = Kind("true or false", p.parse_flag, _FLAG_SCHEMA)
WHOLE = whole(0)
COUNT = whole(1)
PORT = whole(0, endpoints.MAX_PORT)
NUMBER = Kind("a number", p.parse_number, {"type": "number"})
SECONDS = Kind(
    "a number of seconds above 0",
    p.parse_seconds,
    {"type": "number", "exclusiveMinimum": 0, "maximum": p.MOST_SECONDS},
)
_WAIT_SCHEMA = {"type": "number", "minimum": 0, "maximum": p.MOST_SECONDS}
WAIT = Kind("a number of seconds, at least 0", p.parse_wait, _WAIT_SCHEMA)
TEXT = Kind("text, not empty", p.parse_text, _TEXT_SCHEMA, verbatim=True)
PATTERN = Kind(
    "a regular expression that Python can compile, or a list of them",
    p.parse_pattern,
    {"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": {"type": "string"}}]},
    verbatim=True,
)
NAMES = Kind(
    "names separated by commas, or a list of names",
    p.parse_names,
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    write=",".join,
    verbatim=True,
)
HOSTS = Kind(
    "names of nodes separated by commas, or a list of them",
    p.parse_hosts,
    NAMES.schema,
    write=",".join,
    verbatim=True,
)
LINES = Kind(
    "a list of texts", p.parse_lines, _LIST_SCHEMA, write=lambda value: p.write_json(list(value)), verbatim=True
)
TABLE = Kind("a mapping of names to values", p.parse_table, {"type": "object"}, write=p.write_json)
VARIABLES = Kind(
    "a mapping of variable names to texts",
    p.parse_variables,
    {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
    write=p.write_json,
    verbatim=True,
)
PLAN = Kind(
    "a mapping of names, with * for any one part, to styles such as colwise",
    p.parse_plan,
    {"type": "object", "additionalProperties": {"type": "string"}},
    write=p.write_json,
    verbatim=True,
)
RANKS = Kind(
    "all, or rank numbers separated by commas", lp.parse_ranks, {"type": ["string", "integer"]}, verbatim=True
)
DEVICES = Kind(
    "all, or GPU numbers separated by commas", lp.parse_devices, {"type": ["string", "integer"]}, verbatim=True
)
MODULES = Kind(
    "module names separated by commas, or a list of them",
    p.parse_modules,
    NAMES.schema,
    write=p.write_modules,
    verbatim=True,
)
THREE_FLAGS = Kind(
    "true or false for each of forward, data gradient and weight gradient",
    p.parse_three_flags,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    write=lambda value: ",".join(map(p.write, value)),
)
NODE_RANGE = Kind(
    "MIN:MAX, two whole numbers", lp.parse_node_range, {"type": ["string", "integer"]}, verbatim=True
)
ENDPOINT = Kind("HOST:PORT", endpoints.parse_endpoint, {"type": "string"}, verbatim=True)
WORKERS = Kind(
    "a whole number, at least 1, or auto", lp.parse_workers, {"anyOf": [{"type": "integer"}, {"const": "auto"}]}
)
LOCAL_WORKERS = Kind(
    "a whole number, at least 1, or auto, gpu or cpu",
    lp.parse_local_workers,
    {"anyOf": [{"type": "integer"}, {"enum": ["auto", "gpu", "cpu"]}]},
)
SETTINGS = Kind(
    "name=value pairs separated by commas, or a mapping",
    lp.parse_settings,
    {"anyOf": [{"type": "string"}, VARIABLES.schema]},
    write=p.write_json,
    verbatim=True,
)
STREAMS = Kind(
    "0, 1, 2 or 3, or RANK:NUMBER pairs separated by commas",
    lp.parse_streams,
    {"type": ["string", "integer", "object"]},
    verbatim=True,
)
SIGNALS = Kind(
    "signal names separated by commas, or a list of them", lp.parse_signals, NAMES.schema, write=",".join
)
MESH_SIZE = Kind(
    "a whole number, at least 1, or -1 for the rest", lp.parse_mesh_size, {"type": "integer", "minimum": -1}
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
NumaName = Literal["node", "socket", "exclusive", "core-complex"]
ShardName = Literal["auto", "always", "explicit", "off"]
KubernetesName = Literal["job", "trainjob"]
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
WRAP = one_of(WrapName, aliases={"SIZED_BASED_WRAP": "SIZE_BASED_WRAP"})
PREFETCH = one_of(PrefetchName)
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
NUMA = one_of(NumaName)
EVENT_LOG = one_of(EventLogName)
SHARD = one_of(ShardName)
KUBERNETES = one_of(KubernetesName)
CONTEXT = one_of(ContextName)
CONTEXT_BACKEND = one_of(
    ContextBackendName, refused={"DEEPSPEED": "DeepSpeed needs accelerate launch; torch splits sequences here"}
)
SEQUENCE_ATTENTION = one_of(SequenceAttentionName)
SEQUENCE_BACKEND = one_of(SequenceBackendName)
FP8_BACKEND = one_of(Fp8BackendName, refused={"NO": "AO computes float8 here; leave the key out"})
FP8_FORMAT = one_of(Fp8FormatName)
AMAX = one_of(AmaxName)
OPT_LEVEL = one_of(OptLevelName)
DYNAMO = one_of(
    DynamoName,
    aliases={"TORHCHXLA_TRACE_ONCE": "TORCHXLA_TRACE_ONCE"},  # so spelt by accelerate's option
    refused={"NEURON": RUNS_ON} | dict.fromkeys(("NVFUSER", "AOT_NVFUSER", "AOT_CUDAGRAPHS"), _GONE),
)
DYNAMO_MODE = one_of(DynamoModeName)


def _parse_reshard(value: Any) -> bool | int | str:
    """Read a flag or a group size under FSDP2, a strategy's name or code under FSDP1."""
    if isinstance(value, bool):
        return value
    with suppress(ValueError):
        return int(WHOLE.parse(value))
    with suppress(ValueError):
        return p.parse_flag(value)
    return str(STRATEGY.parse(value))


RESHARD = Kind(
    "true, false, a number of ranks (FSDP2), or a sharding strategy's name (FSDP1)",
    _parse_reshard,
    {"anyOf": [{"type": "boolean"}, {"type": "integer"}, STRATEGY.schema]},
)
