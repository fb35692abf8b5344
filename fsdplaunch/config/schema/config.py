"""The one list of configuration keys: name, type, values, default, environment variable, question, text.

YAML validation, env encoding and decoding, command-line options, wizard, `explain`, JSON Schema and the key
reference all walk these classes. None as a default means "decided from the rest of the file", and the text says
how; `fsdplaunch.config.resolve` does it. Standard library only: it runs in every command and in every worker.

Key names, places and meanings are accelerate's where accelerate has the key.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from keyword import iskeyword
from typing import Any

from fsdplaunch.config.schema import Key, Tunable, key
from fsdplaunch.config.schema import kinds as v
from fsdplaunch.config.schema.launch_sections import (
    CheckpointSection,
    KubernetesSection,
    LaunchSection,
    PrecisionSection,
    SlurmSection,
    SshSection,
)
from fsdplaunch.config.schema.sharding_sections import (
    DynamoConfig,
    Fp8Config,
    FsdpConfig,
    ParallelismConfig,
    ShardingSection,
    XlaSection,
)

_TPU = "Written by accelerate for TPUs; without effect here."
_UNUSED = "is not used: this run does not use "
_SAGEMAKER = "Written by accelerate for SageMaker; without effect here."


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole file, every key at its place."""

    compute_environment: v.EnvironmentName | None = key(v.ENVIRONMENT, None)("""
        Written by accelerate. A file with this key means FSDP1 where it sets no fsdp_version.""")
    distributed_type: v.DistributedName = key(v.DISTRIBUTED, "FSDP", pinned=(1, 2))("""
        FSDP shards the model. MULTI_GPU, MULTI_CPU and NO only start the workers, as accelerate does. XLA (or TPU)
        starts them for PyTorch/XLA, and shards if fsdp_config sets xla: true.""")
    num_processes: v.Workers = key(
        v.WORKERS, "auto", question="How many workers in all?", per_node=True, follows=("launch.workers_per_node",)
    )("Worker processes over all nodes: a number, or auto for one per GPU (2 on a node without).")
    num_machines: int = key(v.COUNT, 1, question="How many nodes?", aliases=("nnodes",))("Nodes that take part.")
    machine_rank: int | None = key(v.WHOLE, None, aliases=("node_rank",), per_node=True)("""
        This node's number, from 0. Best left out: the same file then serves every node.""")
    main_process_ip: str | None = key(
        v.TEXT, None, aliases=("master_addr",), per_node=True, follows=("launch.rendezvous_endpoint",)
    )("Address of node 0.")
    main_process_port: int | None = key(
        v.PORT, None, aliases=("master_port",), per_node=True, follows=("launch.rendezvous_endpoint",)
    )("Port of node 0. On one node, left out or 0 takes a free one.")
    rdzv_backend: v.RendezvousName = key(v.RENDEZVOUS, "c10d")("""
        How nodes find each other: c10d, or static, which numbers them by machine_rank.""")
    same_network: bool = key(v.FLAG, True, noise=True)("""
        Written by accelerate; addresses are used the same way whatever its value.""")
    mixed_precision: v.PrecisionName = key(
        v.PRECISION,
        "no",
        env="ACCELERATE_MIXED_PRECISION",
        former={"fp16": "fp16", "bf16": "bf16", "fsdp_config.fsdp_mixed_precision": None},
        question="Which dtype computes?",
        pinned=(1, 2),
        tunable=Tunable(values=("no", "bf16"), when="precision"),
    )("Dtype of forward and backward: no (the model's own), bf16, fp16, fp8.")
    downcast_bf16: bool = key(v.FLAG, False, noise=True)("""
        Under distributed_type XLA without sharding, on a TPU with mixed_precision bf16: true turns fp32 into bf16
        and fp64 into fp32, false turns both into bf16. Without effect elsewhere.""")
    debug: bool = key(v.FLAG, False, env="ACCELERATE_DEBUG_MODE")("""
        Check the shapes and order of collectives on all ranks (TORCH_DISTRIBUTED_DEBUG=DETAIL); slower.""")
    use_cpu: bool = key(v.FLAG, False, env="ACCELERATE_USE_CPU")("Run on CPU with gloo even where there are GPUs.")
    gpu_ids: str | None = key(v.DEVICES, None, per_node=True)("GPUs to use, numbers separated by commas, or all.")
    enable_cpu_affinity: bool = key(
        v.FLAG, False, env="ACCELERATE_CPU_AFFINITY", follows=("launch.numa_binding",)
    )("accelerate's name for launch.numa_binding: node.")
    main_training_function: str = key(v.TEXT, "main", noise=True)("""
        Under PyTorch/XLA, the script's function that is called if the script has trained nothing when it ends.
        Without effect elsewhere.""")
    tpu_name: str | None = key(v.TEXT, None, noise=True)(_TPU)
    tpu_zone: str | None = key(v.TEXT, None, noise=True)(_TPU)
    tpu_use_cluster: bool = key(v.FLAG, False, noise=True)(_TPU)
    tpu_use_sudo: bool = key(v.FLAG, False, noise=True)(_TPU)
    tpu_vm: tuple[str, ...] = key(v.LINES, (), noise=True)(_TPU)
    tpu_env: tuple[str, ...] = key(v.LINES, (), noise=True)(_TPU)
    commands: tuple[str, ...] = key(v.LINES, (), noise=True)(_TPU)
    command_file: str | None = key(v.TEXT, None, noise=True)(_TPU)
    deepspeed_config: dict[str, Any] = key(v.TABLE, {}, leftover=_UNUSED + "DeepSpeed")("Settings of DeepSpeed.")
    megatron_lm_config: dict[str, Any] = key(v.TABLE, {}, leftover=_UNUSED + "Megatron-LM")("""
        Settings of Megatron-LM.""")
    tp_config: dict[str, Any] = key(v.TABLE, {}, leftover="is not used: parallelism_config_tp_size splits layers")(
        "Settings of distributed_type TP, of accelerate 1.4 to 1.6."
    )
    mpirun_config: dict[str, Any] = key(v.TABLE, {}, leftover=_UNUSED + "mpirun")("Settings of mpirun.")
    ipex_config: dict[str, Any] = key(v.TABLE, {}, leftover=_UNUSED + "Intel's extension of torch")("""
        Settings of Intel's extension of torch.""")
    ec2_instance_type: str | None = key(v.TEXT, None, noise=True)(_SAGEMAKER)
    iam_role_name: str | None = key(v.TEXT, None, noise=True)(_SAGEMAKER)
    image_uri: str | None = key(v.TEXT, None, noise=True)(_SAGEMAKER)
    profile: str | None = key(v.TEXT, None, noise=True)(_SAGEMAKER)
    region: str | None = key(v.TEXT, None, noise=True)(_SAGEMAKER)
    base_job_name: str | None = key(v.TEXT, None, noise=True)(_SAGEMAKER)
    pytorch_version: str | None = key(v.TEXT, None, noise=True)(_SAGEMAKER)
    transformers_version: str | None = key(v.TEXT, None, noise=True)(_SAGEMAKER)
    py_version: str | None = key(v.TEXT, None, noise=True)(_SAGEMAKER)
    sagemaker_inputs_file: str | None = key(v.TEXT, None, noise=True)(_SAGEMAKER)
    sagemaker_metrics_file: str | None = key(v.TEXT, None, noise=True)(_SAGEMAKER)
    additional_args: dict[str, Any] = key(v.TABLE, {}, noise=True)(_SAGEMAKER)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    parallelism_config: ParallelismConfig = field(default_factory=ParallelismConfig)
    launch: LaunchSection = field(default_factory=LaunchSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    sharding: ShardingSection = field(default_factory=ShardingSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    fp8_config: Fp8Config = field(default_factory=Fp8Config)
    dynamo_config: DynamoConfig = field(default_factory=DynamoConfig)
    slurm: SlurmSection = field(default_factory=SlurmSection)
    kubernetes: KubernetesSection = field(default_factory=KubernetesSection)
    ssh: SshSection = field(default_factory=SshSection)
    xla: XlaSection = field(default_factory=XlaSection)


KeyPath = tuple[str, ...]
_ACCELERATE_PREFIXES = {
    "fsdp_config": "",
    "parallelism_config": "",
    "fp8_config": "ACCELERATE_FP8_",
    "dynamo_config": "ACCELERATE_",
}
"""What stands before a key's name in the variables that accelerate reads for a section."""


@dataclass(frozen=True, slots=True)
class KeySpec:
    """One configuration key, with everything the schema says about it."""

    path: KeyPath  # where it stands, for example `("fsdp_config", "fsdp_version")`
    key: Key  # the schema's remarks: kind, text, environment variable, versions
    default: Any  # the value when nothing says otherwise. None: decided from the rest of the file

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path[-1]

    @property
    def dotted(self) -> str:
        """Return the whole path, `section.key`."""
        return ".".join(self.path)

    @property
    def env(self) -> str:
        """Return the environment variable that carries the key."""
        prefix = None if self.name.startswith("xla") else _ACCELERATE_PREFIXES.get(self.path[0])
        derived = "FSDPLAUNCH_" + "_".join(self.path) if prefix is None else prefix + self.name
        return self.key.env or derived.upper()


def _section(entry: Field[Any]) -> type | None:
    factory = entry.default_factory
    return factory if isinstance(factory, type) and is_dataclass(factory) else None


def field_name(name: str) -> str:
    """Return the attribute that holds the key `name`: the name itself, but `async_` for `async`."""
    return f"{name}_" if iskeyword(name) else name


def _walk(model: Any, path: KeyPath) -> Iterator[KeySpec]:
    for entry in fields(model):
        section = _section(entry)
        if section is not None:
            yield from _walk(section, (*path, entry.name))
        else:
            default = entry.default if entry.default_factory is MISSING else entry.default_factory()
            yield KeySpec((*path, entry.name.removesuffix("_")), entry.metadata["key"], default)


@cache
def all_keys() -> tuple[KeySpec, ...]:
    """Return every key of the schema."""
    return tuple(_walk(Config, ()))


@cache
def keys_by_path() -> dict[KeyPath, KeySpec]:
    """Return every key, by where it stands."""
    return {spec.path: spec for spec in all_keys()}


@cache
def section_classes() -> dict[str, type]:
    """Return the class of every section, by its name in the file."""
    return {entry.name: section for entry in fields(Config) if (section := _section(entry)) is not None}


def own_sections() -> tuple[str, ...]:
    """Return the sections that accelerate does not have and refuses; the names of its own end in `_config`."""
    return tuple(name for name in section_classes() if not name.endswith("_config"))


def variable_of(dotted: str) -> str:
    """Return the environment variable that carries a key, for example `launch.log_dir`."""
    return keys_by_path()[tuple(dotted.split("."))].env


def value_at(config: Any, path: KeyPath) -> Any:
    """Return the value of the key at `path`."""
    for part in path:
        config = getattr(config, field_name(part))
    return config


def build_config(values: Mapping[KeyPath, Any]) -> Config:
    """Make a Config of canonical values, as `Kind.parse` returns them; keys not named keep their default."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in section_classes()}
    top: dict[str, Any] = {}
    for path, value in values.items():
        place = top if len(path) == 1 else sections[path[0]]
        place[field_name(path[-1])] = value
    built = {name: cls(**sections[name]) for name, cls in section_classes().items()}
    return Config(**top, **built)
