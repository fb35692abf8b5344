"""Sections about the model: how it is sharded, compiled and computed, on GPUs and on TPUs. Part of the one schema.

The environment names of `fp8_config` are those accelerate's readers look up, which for three keys are not the
names its launcher exports.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

from fsdplaunch.config.schema import Tunable, key
from fsdplaunch.config.schema import kinds as v
from fsdplaunch.config.schema.kinds import Kind

_FLAGS = (
    "coalesce_all_gather_ops",
    "disable_reshard_on_root",
    "execute_sharding_on_init",
    "flatten_parameters",
    "fp32_reduce_scatter",
    "optimization_barrier_in_backward",
    "optimization_barrier_in_forward",
    "pin_layout_in_collective_ops",
    "reshard_after_forward",
    "shard_param_on_dim_0",
    "sync_on_finalization",
    "_debug_dummy_all_gather_op",
    "_debug_dummy_all_reduce_op",
    "_debug_dummy_forward_pass",
    "_debug_dummy_optimization_barrier_op",
    "_debug_dummy_reduce_scatter_op",
    "_debug_print",
    "_use_xla_patched_linear",
)
_RENAMED = {"mark_step_on_finalization": "sync_on_finalization"}  # names that older releases of PyTorch/XLA have


def _dtype(value: Any) -> str:
    name = v.DTYPE.parse(str(value).removeprefix("torch."))
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[name]


def _groups(value: Any) -> list[list[int]]:
    if not isinstance(value, list) or not all(isinstance(group, list) for group in value):
        raise ValueError(value)
    return [[v.WHOLE.parse(rank) for rank in group] for group in value]


_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(_FLAGS, v.FLAG),
    **dict.fromkeys(("reduce_scatter_bucket_size_mb", "sharding_rank"), v.WHOLE),
    **dict.fromkeys(("sharding_world_size", "_shard_size_multiple"), v.COUNT),
    **dict.fromkeys(("compute_dtype", "buffer_dtype"), Kind("float32, bfloat16 or float16", _dtype)),
    "sharding_groups": Kind("a list of lists of ranks", _groups),
    "_debug_msg": v.TEXT,
}
"""Every argument of `XlaFullyShardedDataParallel` that a file can hold."""


def parse_xla_settings(value: Any) -> dict[str, Any]:
    """Read arguments of `XlaFullyShardedDataParallel`, by name.

    Raises:
        ValueError: It is not a mapping.
        NotedValueError: A name is not an argument, or a value is not one that it takes.
    """
    found: dict[str, Any] = {}
    table = v.parse_table(value)
    for name, given in table.items():
        newest = _RENAMED.get(name, name)
        near = get_close_matches(name, _FIELDS, n=1)
        try:
            if given is not None and newest in _FIELDS:
                found[newest] = _FIELDS[newest].parse(given)
            msg = ""
        except ValueError:
            msg = f"{name} must be {_FIELDS[newest].expects}, got {given}"
        if newest != name and newest in table:
            msg = f"{name} is the former name of {newest}, and both are set"
        elif newest not in _FIELDS:
            meant = f" (is {near[0]} meant?)" if near else ""
            msg = f"{name} is not an argument of XlaFullyShardedDataParallel that a file can hold{meant}"
        if msg:
            raise v.NotedValueError(msg)
    return found


XLA_SETTINGS = replace(
    v.TABLE, expects="a mapping of arguments of XlaFullyShardedDataParallel", parse=parse_xla_settings
)


@dataclass(frozen=True, slots=True, kw_only=True)
class XlaSection:
    """How PyTorch/XLA's processes start. A section of our own; read where a run uses PyTorch/XLA."""

    processes_per_host: int | None = key(v.COUNT, None, aliases=("num_processes",), per_node=True)("""
        Processes on each host. Left out, one under xla_fsdp_v2, which drives all of the host's devices, else one
        per TPU chip.""")
    cpu_devices: int | None = key(v.COUNT, None, per_node=True)("""
        Devices that PyTorch/XLA makes of this node's CPU where it has no TPU; xla_fsdp_v2 shards over them. Left
        out, num_processes where that is a number, else 2; without xla_fsdp_v2, 1.""")


_WRAP = "fsdp_config.fsdp_auto_wrap_policy"
_ALONE = "is not used: it belongs to DeepSpeed's sequence parallelism"
_NO_SPLIT = v.one_of(
    Literal[1],
    refused={
        "*": "this way to split sequences is DeepSpeed's and needs accelerate launch; under FSDP2 use cp_size"
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpConfig:
    """How the model is sharded. Every key may be written without its `fsdp_` prefix."""

    fsdp_version: int | None = key(v.VERSION, None, question="Which FSDP?", pinned=(1, 2))("""
        Which implementation shards: 2 is fully_shard (one DTensor per parameter), 1 is FullyShardedDataParallel.
        Left out, it is 1 in a file written for accelerate or using a key that only FSDP1 has, else 2.""")
    fsdp_sharding_strategy: v.StrategyName | None = key(
        v.STRATEGY,
        None,
        question="What is sharded?",
        pinned=(1, 2),
        tunable=Tunable(
            values=("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"),
            versions=(1,),
            follow=("fsdp_config.fsdp_reshard_after_forward",),
        ),
        follows=("fsdp_config.fsdp_reshard_after_forward",),
    )("""
        What is split over the ranks. FULL_SHARD (1): parameters, gradients, optimizer state. SHARD_GRAD_OP (2):
        gradients and optimizer state. NO_SHARD (3): nothing. HYBRID_SHARD (4): FULL_SHARD inside each node,
        replicas across nodes. HYBRID_SHARD_ZERO2 (5): SHARD_GRAD_OP inside each node. Left out, FULL_SHARD. Under
        FSDP2 it is translated to a mesh and to fsdp_reshard_after_forward.""")
    fsdp_reshard_after_forward: v.Reshard | None = key(
        v.RESHARD,
        None,
        pinned=(2,),
        tunable=Tunable(
            values=(True, False),
            divisors="below",
            versions=(2,),
            follow=("fsdp_config.fsdp_sharding_strategy",),
            sharded=True,
        ),
        follows=("fsdp_config.fsdp_sharding_strategy",),
    )("""
        FSDP2: free the gathered parameters after forward (true), keep them until backward (false), or keep them
        sharded over groups of N ranks (a whole number). FSDP1: another name for fsdp_sharding_strategy. Left out
        under FSDP2, true unless the strategy says otherwise.""")
    fsdp_offload_params: bool = key(
        v.FLAG, False, aliases=("fsdp_cpu_offload",), tunable=Tunable(values=(True,), gpu=True, when="last")
    )("""
        Keep parameters, gradients and optimizer state in host memory and copy them in for compute. Turn on when
        the model does not fit otherwise; every step gets slower.""")
    fsdp_auto_wrap_policy: v.WrapName = key(
        v.WRAP,
        "TRANSFORMER_BASED_WRAP",
        aliases=("fsdp_wrap_policy",),
        question="What is one unit?",
        pinned=(1, 2),
        tunable=Tunable(values=("TRANSFORMER_BASED_WRAP", "NO_WRAP")),
    )("""
        Which submodules are gathered as one unit. TRANSFORMER_BASED_WRAP (1): the named blocks, or the blocks the
        model repeats. SIZE_BASED_WRAP (2): every module of at least fsdp_min_num_params. NO_WRAP (3): the whole
        model.""")
    fsdp_transformer_layer_cls_to_wrap: tuple[str, ...] = key(
        v.NAMES,
        (),
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
        aliases=("fsdp_transformer_cls_names_to_wrap", "fsdp_transformer_cls_to_wrap"),
    )("""
        Class names of the blocks to wrap, separated by commas or as a list. Left out, the model's own
        _no_split_modules, else the block classes it repeats.""")
    fsdp_min_num_params: int = key(
        v.WHOLE,
        100_000_000,
        aliases=("fsdp_min_num_param",),
        tunable=Tunable(values=(1_000_000, 10_000_000, 100_000_000), needs={_WRAP: ("SIZE_BASED_WRAP",)}),
    )("""
        Smallest number of parameters that SIZE_BASED_WRAP makes a unit of its own. 0 makes none: the whole model
        is one unit.""")
    fsdp_backward_prefetch: v.PrefetchName | None = key(
        v.one_of(v.PrefetchName),
        None,
        versions=(1,),
        aliases=("fsdp_backward_prefetch_policy",),
        pinned=(1,),
        tunable=Tunable(
            values=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
            versions=(1,),
            idle={_WRAP: ("NO_WRAP",), "fsdp_config.fsdp_sharding_strategy": ("NO_SHARD",)},
        ),
    )("""
        When the next unit's parameters are gathered in backward. BACKWARD_PRE (1): before the current gradients
        are computed. BACKWARD_POST (2): after. NO_PREFETCH (3): not ahead. Left out under FSDP1, BACKWARD_PRE.""")
    fsdp_forward_prefetch: bool = key(
        v.FLAG, False, tunable=Tunable(values=(True, False), idle={_WRAP: ("NO_WRAP",)}, sharded=True)
    )("""
        Gather the next unit's parameters while the current one computes forward. Only for models whose units run
        in the same order every step.""")
    fsdp_state_dict_type: v.StateDictName | None = key(
        v.STATE_DICT, None, question="How are checkpoints written?", pinned=(1, 2)
    )("""
        How checkpoints store the model. SHARDED_STATE_DICT (3): every rank writes its own shards. FULL_STATE_DICT
        (1): rank 0 gathers and writes everything. LOCAL_STATE_DICT (2): FSDP1's flat shards. Left out,
        SHARDED_STATE_DICT under FSDP2 and FULL_STATE_DICT under FSDP1.""")
    fsdp_use_orig_params: bool = key(v.FLAG, True, versions=(1,))("""
        Show the optimizer the model's own parameters instead of one flat parameter per unit. Needed for parameter
        groups and for frozen and trainable parameters in one unit.""")
    fsdp_limit_all_gathers: bool = key(
        v.FLAG, True, env="FSDPLAUNCH_FSDP_CONFIG_LIMIT_ALL_GATHERS", versions=(1,)
    )("Keep the host from queueing gathers so far ahead that their memory adds up. Turn off to gather earlier.")
    fsdp_cpu_ram_efficient_loading: bool | None = key(
        v.FLAG, None, pinned=(1, 2), follows=("fsdp_config.fsdp_sync_module_states",)
    )("""
        Only rank 0 loads pretrained weights; the other ranks build empty models and receive them when sharding.
        Saves host memory with transformers' from_pretrained. Left out, true unless fsdp_sync_module_states is
        false. Turn off for scripts that use a pretrained model without preparing it.""")
    fsdp_sync_module_states: bool | None = key(
        v.FLAG, None, follows=("fsdp_config.fsdp_cpu_ram_efficient_loading",)
    )("""
        Send rank 0's parameters and buffers to every rank before sharding. Turn off only when every rank builds
        the same values itself. Left out, true.""")
    fsdp_activation_checkpointing: bool = key(
        v.FLAG, False, tunable=Tunable(values=(True, False)), follows=("fsdp_config.xla_fsdp_grad_ckpt",)
    )("""
        Recompute each block's activations in backward instead of keeping them: much less memory, about a third
        more compute.""")
    fsdp_activation_checkpointing_offload: bool = key(v.FLAG, False, versions=(2,))("""
        Also move the checkpointed blocks' inputs to host memory until backward.""")
    fsdp_ignored_modules: str | None = key(v.PATTERN, None)("""
        Regular expression, or a list of them; modules whose whole name matches are left unsharded. One that
        matches nothing is an error.""")
    xla: bool = key(v.FLAG, False, former={"xla": None})("""
        Shard with PyTorch/XLA, on TPUs, or on a CPU where there are none. torch_xla and the torch that goes with
        it must be installed (the package's extra xla).""")
    xla_fsdp_v2: bool = key(v.FLAG, False, aliases=("xla_v2",), former={"xla_fsdp_v2": None, "xla_v2": None})("""
        Under xla, shard by SPMD: one process per host drives all of its devices. False is
        XlaFullyShardedDataParallel, one process per device.""")
    xla_fsdp_settings: dict[str, Any] = key(XLA_SETTINGS, {}, former={"xla_fsdp_settings": None})("""
        Under xla without xla_fsdp_v2, arguments of XlaFullyShardedDataParallel, dtypes by name: compute_dtype:
        bfloat16. They override other keys.""")
    xla_fsdp_grad_ckpt: bool = key(
        v.FLAG, False, former={"xla_fsdp_grad_ckpt": None}, follows=("fsdp_config.fsdp_activation_checkpointing",)
    )("Under xla, recompute each unit's activations in backward; fsdp_activation_checkpointing means the same.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSection:
    """What accelerate cannot say about sharding."""

    checkpoint_every: int = key(
        v.COUNT, 1, tunable=Tunable(values=(2, 4), needs={"fsdp_config.fsdp_activation_checkpointing": (True,)})
    )("""
        Under fsdp_activation_checkpointing, recompute every n-th block only: with 2 half of the blocks keep their
        activations, for half of the extra compute.""")
    forward_methods: tuple[str, ...] = key(v.NAMES, ())("""
        Methods of the model that compute with its parameters, beside forward and generate, such as
        get_text_features. Parameters are gathered for them as for forward.""")

    tensor_parallel_plan: dict[str, str] = key(v.PLAN, {})("""
        How tp_size splits layers: names of modules or parameters, * for any one part of a name, and styles such as
        colwise and rowwise. Left out, the model's own plan, as transformers' models have it.""")

    context_parallel_attention: v.SequenceAttentionName = key(v.one_of(v.SequenceAttentionName), "auto")("""
        How attention sees the sequences that cp_size splits. heads: each rank computes some of the heads over all
        positions; cp_size must divide them. ring: queries stay, keys and values go from rank to rank. auto: heads
        where cp_size divides them, else ring.""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismConfig:
    """The mesh. Sizes multiply to the number of workers; -1, for one of them, takes what the others leave."""

    parallelism_config_dp_replicate_size: int | None = key(
        v.MESH_SIZE,
        None,
        tunable=Tunable(
            divisors="through", versions=(2,), follow=("parallelism_config.parallelism_config_dp_shard_size",)
        ),
        follows=("fsdp_config.fsdp_sharding_strategy", "num_machines"),
    )("""
        Number of replicas of the model. Left out, 1; under FSDP2 with HYBRID_SHARD, one per node, and with
        NO_SHARD one per worker.""")
    parallelism_config_dp_shard_size: int | None = key(
        v.MESH_SIZE,
        None,
        follows=("fsdp_config.fsdp_sharding_strategy", "num_machines", "num_processes", "launch.workers_per_node"),
    )("""
        Number of ranks that read different data and share one replica's shards. Left out, all that the other sizes
        leave. With cp_size the shards are spread over the product of both.""")
    parallelism_config_tp_size: int = key(v.MESH_SIZE, 1)("""
        Ranks that split each layer's matrices and compute on the same data (tensor parallelism). They exchange
        activations in every layer: keep them inside one node.""")
    parallelism_config_cp_size: int = key(v.MESH_SIZE, 1)("""
        Ranks that split each sequence and compute attention together (context parallelism), for sequences whose
        activations do not fit.""")
    parallelism_config_cp_backend: v.ContextBackendName = key(v.CONTEXT_BACKEND, "torch")("""
        What splits the sequence in attention.""")
    parallelism_config_cp_comm_strategy: v.ContextName = key(v.one_of(v.ContextName), "allgather")("""
        How accelerate's attention sees the other ranks' shards of the sequence: allgather or alltoall.""")
    parallelism_config_sp_size: int = key(_NO_SPLIT, 1, leftover=_ALONE)("""
        Ranks that split the sequence between layers.""")
    parallelism_config_sp_backend: v.SequenceBackendName = key(
        v.one_of(v.SequenceBackendName), "deepspeed", leftover=_ALONE
    )("What splits the sequence between layers.")
    parallelism_config_sp_seq_length: int | None = key(
        v.COUNT, None, leftover=_ALONE, aliases=("parallelism_config_cp_seq_length",)
    )("Length of the sequences, where all have the same.")
    parallelism_config_sp_seq_length_is_variable: bool = key(
        v.FLAG, True, leftover=_ALONE, aliases=("parallelism_config_cp_seq_length_is_variable",)
    )("Whether sequences differ in length.")
    parallelism_config_sp_attn_implementation: str = key(
        v.TEXT, "sdpa", leftover=_ALONE, aliases=("parallelism_config_cp_attn_implementation",)
    )("Which attention the split sequences use.")


_OTHER = "is read by TransformerEngine and MS-AMP only, and torchao computes float8 where a model is sharded"


_other_key = partial(key, leftover=_OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """How float8 computes. Has a meaning only under mixed_precision: fp8."""

    backend: v.Fp8BackendName | None = key(v.FP8_BACKEND, None)("""
        Which library computes. A sharded model is computed by AO (torchao), whose name may be left out. Where
        nothing is sharded, a script's Accelerator takes the one that is named, or finds one.""")
    enable_fsdp_float8_all_gather: bool = key(v.FLAG, True)("""
        AO: gather parameters in float8, half the traffic of bf16.""")
    pad_inner_dim: bool = key(v.FLAG, True)("AO: pad matrices to multiples of 16.")
    use_autocast_during_eval: bool = _other_key(v.FLAG, False)("TE: compute in float8 in evaluation too.")
    margin: int = _other_key(v.WHOLE, 0)("TE: margin of the scaling factor.")
    interval: int = _other_key(v.COUNT, 1)("TE: steps between new scaling factors.")
    fp8_format: v.Fp8FormatName = _other_key(v.one_of(v.Fp8FormatName), "HYBRID", env="ACCELERATE_FP8_FORMAT")("""
        TE: dtype of forward and backward.""")
    amax_history_length: int = _other_key(
        v.COUNT, 1024, env="ACCELERATE_FP8_AMAX_HISTORY_LEN", aliases=("amax_history_len",)
    )("TE: steps whose largest values decide the scaling factor.")
    amax_compute_algorithm: v.AmaxName = _other_key(
        v.one_of(v.AmaxName), "most_recent", env="ACCELERATE_FP8_AMAX_COMPUTE_ALGO", aliases=("amax_compute_algo",)
    )("TE: which of those values decides.")
    override_linear_precision: tuple[bool, bool, bool] = _other_key(
        v.THREE_FLAGS, (False, False, False), env="FSDPLAUNCH_FP8_CONFIG_OVERRIDE_LINEAR_PRECISION"
    )("TE: compute forward, data gradient, weight gradient in higher precision.")
    use_mxfp8_block_scaling: bool = _other_key(v.FLAG, False)("TE: one scale per block of 32 values.")
    optimization_level: v.OptLevelName = _other_key(
        v.OPT_LEVEL, "O2", env="ACCELERATE_FP8_OPT_LEVEL", aliases=("opt_level",)
    )("MSAMP: what is kept in float8.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoConfig:
    """Compiling the model with torch.compile. Every key may be written without its `dynamo_` prefix."""

    dynamo_backend: v.DynamoName = key(
        v.DYNAMO, "NO", former={"dynamo_backend": None}, tunable=Tunable(values=("INDUCTOR",), when="compile")
    )("""
        Backend of torch.compile; NO does not compile. The names are torch's, in upper case; a backend that this
        torch does not have is refused when the model is prepared.""")
    dynamo_mode: v.DynamoModeName = key(v.one_of(v.DynamoModeName), "default")("Mode of torch.compile.")
    dynamo_use_fullgraph: bool = key(v.FLAG, False)("Fail where the graph would break.")
    dynamo_use_dynamic: bool = key(v.FLAG, False)("Compile for shapes that change.")
    dynamo_use_regional_compilation: bool = key(
        v.FLAG,
        False,
        tunable=Tunable(values=(True,), needs={"dynamo_config.dynamo_backend": ("INDUCTOR",)}, when="compile"),
    )("""
        Compile each block by itself, and blocks of one class once. Left false, the whole forward is handed to
        torch.compile, which breaks the graph at the boundary of every unit and compiles the parts.""")
