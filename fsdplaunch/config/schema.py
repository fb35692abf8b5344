"""The one list of configuration keys: name, type, values, default, environment variable, question, text.

YAML validation, env encoding and decoding, command-line options, wizard, `explain`, JSON Schema and the key
reference all walk these classes. None as a default means "decided from the rest of the file", and the text says
how; `fsdplaunch.config.resolve` does it. Standard library only: it runs in every command and in every worker.

Key names, places and meanings are accelerate's where accelerate has the key.
"""

from dataclasses import dataclass, field
from typing import Any

from fsdplaunch.config import values as v


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What the schema says about a key beside its Python type and default.

    Attributes:
        kind: How a loose value is read.
        text: What the key does and when to change it.
        env: The environment variable that carries it to the workers; "": `FSDPLAUNCH_` and the key's path.
        versions: The FSDP versions the key has a meaning in.
        aliases: Other spellings that are honoured and name this one.
        question: What the wizard asks, or None when it does not ask.
        noise: Written by accelerate and without any effect on FSDP training; read, and named in one note.
        pending: Why a value other than the default is refused for now, or None.
    """

    kind: v.Kind
    text: str
    env: str = ""
    versions: tuple[int, ...] = (1, 2)
    aliases: tuple[str, ...] = ()
    question: str | None = None
    noise: bool = False
    pending: str | None = None


def _key(kind: v.Kind, default: Any, text: str, **remarks: Any) -> Any:
    """Declare a key. Typed Any so that the class below can give the precise type."""
    metadata = {"key": Key(kind=kind, text=" ".join(text.split()), **remarks)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpConfig:
    """How the model is sharded. Every key may be written without its `fsdp_` prefix."""

    fsdp_version: int | None = _key(
        v.VERSION,
        None,
        """Which implementation shards: 2 is fully_shard (one DTensor per parameter), 1 is
        FullyShardedDataParallel. Left out, it is 1 in a file written for accelerate or using a key that only
        version 1 has, else 2.""",
        env="FSDP_VERSION",
        question="Which FSDP?",
    )
    fsdp_sharding_strategy: v.StrategyName | None = _key(
        v.STRATEGY,
        None,
        """What is split over the ranks. FULL_SHARD (1): parameters, gradients, optimizer state.
        SHARD_GRAD_OP (2): gradients and optimizer state. NO_SHARD (3): nothing. HYBRID_SHARD (4): FULL_SHARD
        inside each node, copies across nodes. HYBRID_SHARD_ZERO2 (5): SHARD_GRAD_OP inside each node. Left out,
        FULL_SHARD. Under version 2 it is translated to a mesh and to fsdp_reshard_after_forward.""",
        env="FSDP_SHARDING_STRATEGY",
        question="What is sharded?",
    )
    fsdp_reshard_after_forward: v.Reshard | None = _key(
        v.RESHARD,
        None,
        """Version 2: free the gathered parameters after forward (true), keep them until backward (false), or keep
        them sharded over groups of N ranks (a whole number). Version 1: another name for fsdp_sharding_strategy.
        Left out under version 2, true unless the strategy says otherwise.""",
        env="FSDP_RESHARD_AFTER_FORWARD",
    )
    fsdp_offload_params: bool = _key(
        v.FLAG,
        False,
        """Keep parameters, gradients and optimizer state in host memory and copy them in for compute. Turn on when
        the model does not fit otherwise; every step gets slower.""",
        env="FSDP_OFFLOAD_PARAMS",
    )
    fsdp_auto_wrap_policy: v.WrapName = _key(
        v.WRAP,
        "TRANSFORMER_BASED_WRAP",
        """Which submodules are gathered as one unit. TRANSFORMER_BASED_WRAP (1): the named blocks, or the blocks
        the model repeats. SIZE_BASED_WRAP (2): every module of at least fsdp_min_num_params. NO_WRAP (3): the
        whole model.""",
        env="FSDP_AUTO_WRAP_POLICY",
        aliases=("fsdp_wrap_policy",),
        question="What is one unit?",
    )
    fsdp_transformer_layer_cls_to_wrap: tuple[str, ...] = _key(
        v.NAMES,
        (),
        """Class names of the blocks to wrap, separated by commas or as a list. Left out, the model's own
        _no_split_modules, else the block classes it repeats.""",
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
        aliases=("transformer_cls_names_to_wrap",),
    )
    fsdp_min_num_params: int = _key(
        v.WHOLE,
        100_000_000,
        "Smallest number of parameters that SIZE_BASED_WRAP makes a unit of its own.",
        env="FSDP_MIN_NUM_PARAMS",
        aliases=("min_num_param", "fsdp_min_num_param"),
    )
    fsdp_backward_prefetch: v.PrefetchName | None = _key(
        v.PREFETCH,
        None,
        """When the next unit's parameters are gathered in backward. BACKWARD_PRE (1): before the current gradients
        are computed. BACKWARD_POST (2): after. NO_PREFETCH (3): not ahead. Left out under version 1,
        BACKWARD_PRE.""",
        env="FSDP_BACKWARD_PREFETCH",
        versions=(1,),
        aliases=("fsdp_backward_prefetch_policy",),
    )
    fsdp_forward_prefetch: bool = _key(
        v.FLAG,
        False,
        """Gather the next unit's parameters while the current one computes forward. Only for models whose units
        run in the same order every step.""",
        env="FSDP_FORWARD_PREFETCH",
    )
    fsdp_state_dict_type: v.StateDictName | None = _key(
        v.STATE_DICT,
        None,
        """How checkpoints hold the model. SHARDED_STATE_DICT (3): every rank writes its own part. FULL_STATE_DICT
        (1): rank 0 gathers and writes everything. LOCAL_STATE_DICT (2): version 1's flat shards. Left out,
        SHARDED_STATE_DICT under version 2 and FULL_STATE_DICT under version 1.""",
        env="FSDP_STATE_DICT_TYPE",
        question="How are checkpoints written?",
    )
    fsdp_use_orig_params: bool = _key(
        v.FLAG,
        True,
        """Show the optimizer the model's own parameters instead of one flat parameter per unit. Needed for
        parameter groups and for frozen and trainable parameters in one unit.""",
        env="FSDP_USE_ORIG_PARAMS",
        versions=(1,),
    )
    fsdp_cpu_ram_efficient_loading: bool = _key(
        v.FLAG,
        False,
        """Only rank 0 loads pretrained weights; the other ranks build empty models and receive them when sharding.
        Saves host memory with transformers' from_pretrained.""",
        env="FSDP_CPU_RAM_EFFICIENT_LOADING",
    )
    fsdp_sync_module_states: bool | None = _key(
        v.FLAG,
        None,
        """Send rank 0's parameters and buffers to every rank before sharding. Left out under version 1, true.""",
        env="FSDP_SYNC_MODULE_STATES",
        versions=(1,),
    )
    fsdp_activation_checkpointing: bool = _key(
        v.FLAG,
        False,
        """Recompute each block's activations in backward instead of keeping them: much less memory, about a third
        more compute.""",
        env="FSDP_ACTIVATION_CHECKPOINTING",
    )
    fsdp_activation_checkpointing_offload: bool = _key(
        v.FLAG,
        False,
        "Also move the checkpointed blocks' inputs to host memory until backward.",
        env="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        versions=(2,),
    )
    fsdp_ignored_modules: str | None = _key(
        v.TEXT,
        None,
        "Regular expression; modules whose whole name matches are left unsharded.",
        env="FSDP_IGNORED_MODULES",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismConfig:
    """The mesh of version 2. Sizes multiply to the number of workers; -1 takes what the others leave."""

    parallelism_config_dp_replicate_size: int = _key(
        v.WHOLE, 1, "Number of complete copies of the model.", env="PARALLELISM_CONFIG_DP_REPLICATE_SIZE"
    )
    parallelism_config_dp_shard_size: int | None = _key(
        v.WHOLE,
        None,
        "Number of ranks that one copy is sharded over. Left out, all that dp_replicate_size leaves.",
        env="PARALLELISM_CONFIG_DP_SHARD_SIZE",
    )
    parallelism_config_tp_size: int = _key(
        v.WHOLE,
        1,
        "Ranks that split each layer.",
        env="PARALLELISM_CONFIG_TP_SIZE",
        pending="tensor parallelism is not supported yet",
    )
    parallelism_config_cp_size: int = _key(
        v.WHOLE,
        1,
        "Ranks that split the sequence in attention.",
        env="PARALLELISM_CONFIG_CP_SIZE",
        pending="context parallelism is not supported yet",
    )
    parallelism_config_sp_size: int = _key(
        v.WHOLE,
        1,
        "Ranks that split the sequence between layers.",
        env="PARALLELISM_CONFIG_SP_SIZE",
        pending="sequence parallelism is not supported yet",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSection:
    """How workers are started. A section of our own; accelerate has no such keys in its file."""

    workers_per_node: v.Workers | None = _key(
        v.WORKERS,
        None,
        """Worker processes per machine: a number, or auto for one per GPU (2 without GPUs). Left out,
        num_processes divided by num_machines.""",
        question="How many workers on each machine?",
    )
    max_restarts: int = _key(v.WHOLE, 0, "How often all workers are started again after one of them failed.")
    rendezvous_endpoint: str | None = _key(
        v.TEXT, None, "HOST:PORT where the machines meet. Left out on one machine, a free local port."
    )
    rendezvous_timeout_seconds: float = _key(
        v.NUMBER, 300.0, "How long to wait for the other machines before giving up."
    )
    process_group_timeout_seconds: float = _key(
        v.NUMBER, 600.0, "How long a collective may wait for the slowest rank before the run fails."
    )
    log_dir: str = _key(
        v.TEXT, "runs", "Folder that gets one subfolder per run, with the plan, the result and rank output."
    )
    show_ranks: str = _key(
        v.TEXT,
        "0",
        """Ranks whose output reaches the terminal: all, or numbers separated by commas. Every other rank's output
        goes to its files in the run's folder.""",
    )
    env: dict[str, Any] = _key(v.TABLE, {}, "Further environment variables for the workers, name: value.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSection:
    """Number formats, each on its own. Left out, mixed_precision decides."""

    param: v.DtypeName | None = _key(
        v.DTYPE, None, "Format parameters are gathered and computed in. Left out, that of mixed_precision."
    )
    reduce: v.DtypeName | None = _key(
        v.DTYPE,
        None,
        "Format gradients are summed over ranks in. Left out, fp32 whenever parameters compute in less.",
    )
    output: v.DtypeName | None = _key(
        v.DTYPE,
        None,
        "Format the model's outputs are cast to (version 2). Left out, that of the computation.",
        versions=(2,),
    )
    buffer: v.DtypeName | None = _key(
        v.DTYPE,
        None,
        "Format of buffers in forward (version 1). Left out, that of mixed_precision.",
        versions=(1,),
    )
    master: v.DtypeName | None = _key(
        v.DTYPE,
        None,
        """Format the shards and the optimizer state are kept in. Left out, fp32 under mixed precision, else the
        model's own.""",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Where and how checkpoints are written."""

    dir: str = _key(
        v.TEXT,
        "checkpoints",
        "Folder that save_checkpoint and load_checkpoint use when the script names none.",
    )


_TPU = "Written by accelerate for TPUs; without effect here."


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole file, every key at its place."""

    compute_environment: str | None = _key(
        v.TEXT, None, "Written by accelerate; only LOCAL_MACHINE can be launched.", noise=True
    )
    distributed_type: v.DistributedName = _key(
        v.DISTRIBUTED,
        "FSDP",
        "FSDP shards the model. MULTI_GPU, MULTI_CPU and NO only start the workers, as accelerate does.",
    )
    num_processes: v.Workers = _key(
        v.WORKERS,
        "auto",
        "Worker processes over all machines: a number, or auto for one per GPU (2 on a machine without).",
        question="How many workers in all?",
    )
    num_machines: int = _key(v.WHOLE, 1, "Machines that take part.", question="How many machines?")
    machine_rank: int | None = _key(
        v.WHOLE,
        None,
        "This machine's number, from 0. Best left out: the same file then serves every machine.",
    )
    main_process_ip: str | None = _key(v.TEXT, None, "Address of machine 0.")
    main_process_port: int | None = _key(
        v.WHOLE, None, "Port of machine 0. Left out or 0 on one machine, a free one."
    )
    rdzv_backend: v.RendezvousName = _key(
        v.RENDEZVOUS,
        "c10d",
        "How machines find each other: c10d, or static, which numbers them by machine_rank.",
    )
    same_network: bool = _key(
        v.FLAG, True, "Written by accelerate; addresses are used the same way whatever it says.", noise=True
    )
    mixed_precision: v.PrecisionName = _key(
        v.PRECISION,
        "no",
        "Format of forward and backward: no (the model's own), bf16, fp16, fp8.",
        env="ACCELERATE_MIXED_PRECISION",
        question="Which number format computes?",
    )
    downcast_bf16: str = _key(v.TEXT, "no", _TPU, noise=True)
    debug: bool = _key(
        v.FLAG,
        False,
        "Check the shapes and order of collectives on all ranks (TORCH_DISTRIBUTED_DEBUG=DETAIL); slower.",
        env="ACCELERATE_DEBUG_MODE",
    )
    use_cpu: bool = _key(
        v.FLAG, False, "Run on CPU with gloo even where there are GPUs.", env="ACCELERATE_USE_CPU"
    )
    gpu_ids: str | None = _key(v.TEXT, None, "GPUs to use, numbers separated by commas, or all.")
    main_training_function: str = _key(v.TEXT, "main", _TPU, noise=True)
    tpu_name: str | None = _key(v.TEXT, None, _TPU, noise=True)
    tpu_zone: str | None = _key(v.TEXT, None, _TPU, noise=True)
    tpu_use_cluster: bool = _key(v.FLAG, False, _TPU, noise=True)
    tpu_use_sudo: bool = _key(v.FLAG, False, _TPU, noise=True)
    tpu_vm: tuple[str, ...] = _key(v.LINES, (), _TPU, noise=True)
    tpu_env: tuple[str, ...] = _key(v.LINES, (), _TPU, noise=True)
    commands: tuple[str, ...] = _key(v.LINES, (), _TPU, noise=True)
    command_file: str | None = _key(v.TEXT, None, _TPU, noise=True)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    parallelism_config: ParallelismConfig = field(default_factory=ParallelismConfig)
    launch: LaunchSection = field(default_factory=LaunchSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
