"""How one model is sharded: plain, frozen values, decided before any torch object is made of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdplaunch.config.schema import Config
from fsdplaunch.config.values import PrefetchName, StateDictName, StrategyName, WrapName
from fsdplaunch.errors import ShardingError

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The configuration's names of number formats."""

HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Strategies that shard inside a group of ranks and copy across groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """Number formats; None means the model's own.

    Attributes:
        param: Parameters as gathered and computed with.
        reduce: Gradients as summed over ranks.
        output: What the model's outputs are cast to (version 2).
        buffer: Buffers in forward (version 1).
        master: Shards and optimizer state.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffer: torch.dtype | None = None
    master: torch.dtype | None = None

    @property
    def mixed(self) -> bool:
        """Whether anything is computed, reduced or returned in another format than the model's own."""
        return any(kind is not None for kind in (self.param, self.reduce, self.output, self.buffer))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that sharding one model needs to know. Names are those of the configuration.

    Attributes:
        version: 1 or 2.
        wrap: The policy's name, or a function of the user's: a module -> whether it is a unit.
        reshard_after_forward: Version 2: flag, or the number of ranks to reshard to.
        ignored: Regular expression for module names, or the modules themselves.
        replicate_size: Copies of the model, -1 for what `shard_size` leaves.
        shard_size: Ranks per copy, -1 or None for what `replicate_size` leaves.
        param_init_fn: Gives a module without storage its values, or None.
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
    ignored: str | tuple[nn.Module, ...] | None = None
    dtypes: Dtypes = Dtypes()
    replicate_size: int = 1
    shard_size: int | None = None
    param_init_fn: Callable[[nn.Module], Any] | None = None


def settings_of(config: Config) -> Settings:
    """Translate a resolved Config.

    Raises:
        ShardingError: It asks for fp8, which nothing here computes in yet.
    """
    if config.mixed_precision == "fp8":
        msg = "mixed_precision fp8 is not supported yet"
        raise ShardingError(msg, hint="set mixed_precision to bf16")
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
        ram_efficient=bool(fsdp.fsdp_cpu_ram_efficient_loading),
        sync_module_states=True if sync is None else sync,
        activation_checkpointing=fsdp.fsdp_activation_checkpointing,
        activation_offload=fsdp.fsdp_activation_checkpointing_offload,
        ignored=fsdp.fsdp_ignored_modules,
        dtypes=_dtypes_of(config),
        replicate_size=mesh.parallelism_config_dp_replicate_size or 1,
        shard_size=mesh.parallelism_config_dp_shard_size,
    )


def _dtypes_of(config: Config) -> Dtypes:
    said = config.precision
    return Dtypes(
        param=DTYPES[said.param] if said.param else None,
        reduce=DTYPES[said.reduce] if said.reduce else None,
        output=DTYPES[said.output] if said.output else None,
        buffer=DTYPES[said.buffer] if said.buffer else None,
        master=DTYPES[said.master] if said.master else None,
    )
