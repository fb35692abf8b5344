"""How one model is sharded: plain, frozen values, decided before any torch object is made of them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.kinds import (
    PrefetchName,
    SequenceAttentionName,
    StateDictName,
    StrategyName,
    WrapName,
)
from fsdplaunch.config.schema.sharding_sections import DynamoConfig, Fp8Config
from fsdplaunch.runtime import messages

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The configuration's names of dtypes."""

HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Strategies that shard inside a group of ranks and replicate across groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """Dtypes; None means the model's own.

    Attributes:
        param: Parameters as gathered and computed with.
        reduce: Gradients as summed over ranks.
        output: What the model's outputs are cast to (FSDP2).
        buffer: Buffers in forward (FSDP1).
        master: Shards and optimizer state.
        template: Torch's object that the dtypes were taken from, for what else it sets.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffer: torch.dtype | None = None
    master: torch.dtype | None = None
    template: Any = field(default=None, compare=False)

    @property
    def mixed(self) -> bool:
        """Return whether anything is computed, reduced or returned in another dtype than the model's own."""
        return any(kind is not None for kind in (self.param, self.reduce, self.output, self.buffer))


def fsdp1_policy(dtypes: Dtypes) -> MixedPrecision:
    """Return torch's object for the dtypes under FSDP1, with all else that their template sets."""
    names = {"param_dtype": dtypes.param, "reduce_dtype": dtypes.reduce, "buffer_dtype": dtypes.buffer}
    return replace(dtypes.template or MixedPrecision(), **names)


def fsdp2_policy(dtypes: Dtypes) -> MixedPrecisionPolicy:
    """Return torch's object for the dtypes under FSDP2, with all else that their template sets."""
    names = {"param_dtype": dtypes.param, "reduce_dtype": dtypes.reduce, "output_dtype": dtypes.output}
    return replace(dtypes.template or MixedPrecisionPolicy(), **names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that sharding one model needs to know. Names are those of the configuration.

    Attributes:
        version: 1 or 2.
        wrap: The policy's name, or a function of the user's: a module -> whether it is a unit.
        reshard_after_forward: FSDP2: flag, or the number of ranks to reshard to.
        ignored: Regular expression for module names, or several, or the modules themselves.
        replicate_size: Replicas of the model, -1 for what `shard_size` leaves.
        shard_size: Ranks per replica, -1 or None for what `replicate_size` leaves.
        param_init_fn: Gives a module without storage its values, or None.
        checkpoint_every: Under activation_checkpointing, 2 for every second block, and so on.
        forward_methods: Methods of the model to gather parameters for, beside forward and generate.
        compiling: How to compile, or None.
        float8: How linear layers compute in float8, or None.
        context_size: Ranks that split each sequence.
        context_attention: How attention sees the other ranks' pieces.
        tensor_size: Ranks that split each layer, -1 for what the other sizes leave.
        tensor_plan: How they do: patterns of names and styles; empty for the model's own plan.
    """

    version: int = 2
    strategy: StrategyName = "FULL_SHARD"
    reshard_after_forward: bool | int = True
    offload: bool = False
    wrap: WrapName | Callable[..., Any] = "TRANSFORMER_BASED_WRAP"
    block_classes: tuple[str, ...] = ()
    min_num_params: int = 100_000_000
    backward_prefetch: PrefetchName = "NO_PREFETCH"
    forward_prefetch: bool = False
    state_dict_type: StateDictName = "SHARDED_STATE_DICT"
    use_orig_params: bool = True
    limit_all_gathers: bool = True
    ram_efficient: bool = False
    sync_module_states: bool = True
    activation_checkpointing: bool = False
    activation_offload: bool = False
    ignored: str | tuple[nn.Module | str, ...] | None = None
    dtypes: Dtypes = Dtypes()
    replicate_size: int = 1
    shard_size: int | None = None
    param_init_fn: Callable[[nn.Module], Any] | None = None
    checkpoint_every: int = 1
    forward_methods: tuple[str, ...] = ()
    compiling: DynamoConfig | None = None
    float8: Fp8Config | None = None
    context_size: int = 1
    context_attention: SequenceAttentionName = "auto"
    tensor_size: int = 1
    tensor_plan: tuple[tuple[str, str], ...] = ()

    @property
    def wraps_nothing(self) -> bool:
        """Return whether the model is one unit: by NO_WRAP, or by a smallest size of 0, as in accelerate."""
        return self.wrap == "NO_WRAP" or (self.wrap == "SIZE_BASED_WRAP" and self.min_num_params == 0)


def offloads(settings: Settings, device_type: str) -> bool:
    """Return whether shards are kept in host memory and copied to the device; on a CPU they are there anyway."""
    if settings.offload and device_type == "cpu":
        messages.say("fsdp_offload_params changes nothing without a GPU: parameters are in host memory already")
    return settings.offload and device_type != "cpu"


def settings_of(config: Config) -> Settings:
    """Translate a resolved Config."""
    fsdp, mesh = config.fsdp_config, config.parallelism_config
    reshard = fsdp.fsdp_reshard_after_forward
    sync = fsdp.fsdp_sync_module_states
    return Settings(
        version=fsdp.fsdp_version or 2,
        strategy=fsdp.fsdp_sharding_strategy or "FULL_SHARD",
        reshard_after_forward=True if reshard is None or isinstance(reshard, str) else reshard,
        offload=fsdp.fsdp_offload_params,
        wrap=fsdp.fsdp_auto_wrap_policy,
        block_classes=fsdp.fsdp_transformer_layer_cls_to_wrap,
        min_num_params=fsdp.fsdp_min_num_params,
        backward_prefetch=fsdp.fsdp_backward_prefetch or "NO_PREFETCH",
        forward_prefetch=fsdp.fsdp_forward_prefetch,
        state_dict_type=fsdp.fsdp_state_dict_type or "SHARDED_STATE_DICT",
        use_orig_params=fsdp.fsdp_use_orig_params,
        limit_all_gathers=fsdp.fsdp_limit_all_gathers,
        ram_efficient=bool(fsdp.fsdp_cpu_ram_efficient_loading),
        sync_module_states=sync is not False or bool(fsdp.fsdp_cpu_ram_efficient_loading),
        activation_checkpointing=fsdp.fsdp_activation_checkpointing,
        activation_offload=fsdp.fsdp_activation_checkpointing_offload,
        ignored=fsdp.fsdp_ignored_modules,
        dtypes=_dtypes_of(config),
        replicate_size=mesh.parallelism_config_dp_replicate_size or 1,
        shard_size=mesh.parallelism_config_dp_shard_size,
        checkpoint_every=config.sharding.checkpoint_every,
        forward_methods=config.sharding.forward_methods,
        compiling=config.dynamo_config if config.dynamo_config.dynamo_backend != "NO" else None,
        float8=config.fp8_config if config.mixed_precision == "fp8" else None,
        context_size=mesh.parallelism_config_cp_size,
        context_attention=config.sharding.context_parallel_attention,
        tensor_size=mesh.parallelism_config_tp_size,
        tensor_plan=tuple(config.sharding.tensor_parallel_plan.items()),
    )


def _dtypes_of(config: Config) -> Dtypes:
    kinds = ("param", "reduce", "output", "buffer", "master")
    named = {kind: name for kind in kinds if (name := getattr(config.precision, kind))}
    return Dtypes(**{kind: DTYPES[name] for kind, name in named.items()})
