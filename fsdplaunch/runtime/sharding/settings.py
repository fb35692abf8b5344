"""How one model is sharded: plain, frozen values, decided before any torch object is made of them."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from fsdplaunch.config.schema.config import Config, KeyPath, value_at
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
    """Dtypes; None means the model's own."""

    param: torch.dtype | None = None  # parameters as gathered and computed with
    reduce: torch.dtype | None = None  # gradients as summed over ranks
    output: torch.dtype | None = None  # what the model's outputs are cast to (FSDP2)
    buffer: torch.dtype | None = None  # buffers in forward (FSDP1)
    master: torch.dtype | None = None  # shards and optimizer state
    template: Any = field(default=None, compare=False)  # torch's object they are from, for what else it sets

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


def of_key(dotted: str) -> dict[str, KeyPath]:
    """Return what says of a field that it holds a key's value; its default is for an open one."""
    section, _, name = dotted.rpartition(".")
    return {"path": (section or "fsdp_config", name)}


_MESH = "parallelism_config.parallelism_config_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that sharding one model needs to know, most of it the value of a key of the configuration.

    A size of -1 stands for what the other ones leave; a wrap policy may be a function of the user's.
    """

    version: int = field(default=2, metadata=of_key("fsdp_version"))
    strategy: StrategyName = field(default="FULL_SHARD", metadata=of_key("fsdp_sharding_strategy"))
    reshard_after_forward: bool | int = field(default=True, metadata=of_key("fsdp_reshard_after_forward"))
    offload: bool = field(default=False, metadata=of_key("fsdp_offload_params"))
    wrap: WrapName | Callable[..., Any] = field(
        default="TRANSFORMER_BASED_WRAP", metadata=of_key("fsdp_auto_wrap_policy")
    )
    block_classes: tuple[str, ...] = field(default=(), metadata=of_key("fsdp_transformer_layer_cls_to_wrap"))
    min_num_params: int = field(default=100_000_000, metadata=of_key("fsdp_min_num_params"))
    backward_prefetch: PrefetchName = field(default="NO_PREFETCH", metadata=of_key("fsdp_backward_prefetch"))
    forward_prefetch: bool = field(default=False, metadata=of_key("fsdp_forward_prefetch"))
    state_dict_type: StateDictName = field(default="SHARDED_STATE_DICT", metadata=of_key("fsdp_state_dict_type"))
    use_orig_params: bool = field(default=True, metadata=of_key("fsdp_use_orig_params"))
    limit_all_gathers: bool = field(default=True, metadata=of_key("fsdp_limit_all_gathers"))
    ram_efficient: bool = field(default=False, metadata=of_key("fsdp_cpu_ram_efficient_loading"))
    sync_module_states: bool = field(default=True, metadata=of_key("fsdp_sync_module_states"))
    activation_checkpointing: bool = field(default=False, metadata=of_key("fsdp_activation_checkpointing"))
    activation_offload: bool = field(default=False, metadata=of_key("fsdp_activation_checkpointing_offload"))
    ignored: str | tuple[nn.Module | str, ...] | None = field(
        default=None, metadata=of_key("fsdp_ignored_modules")
    )
    replicate_size: int = field(default=1, metadata=of_key(f"{_MESH}dp_replicate_size"))
    shard_size: int | None = field(default=None, metadata=of_key(f"{_MESH}dp_shard_size"))
    context_size: int = field(default=1, metadata=of_key(f"{_MESH}cp_size"))
    tensor_size: int = field(default=1, metadata=of_key(f"{_MESH}tp_size"))
    checkpoint_every: int = field(default=1, metadata=of_key("sharding.checkpoint_every"))
    forward_methods: tuple[str, ...] = field(default=(), metadata=of_key("sharding.forward_methods"))
    context_attention: SequenceAttentionName = field(
        default="auto", metadata=of_key("sharding.context_parallel_attention")
    )
    tensor_plan: tuple[tuple[str, str], ...] = ()  # patterns of names and styles; empty for the model's own plan
    dtypes: Dtypes = Dtypes()
    compiling: DynamoConfig | None = None
    float8: Fp8Config | None = None  # how linear layers compute in it
    param_init_fn: Callable[[nn.Module], Any] | None = None  # gives a module without storage its values

    @property
    def wraps_nothing(self) -> bool:
        """Return whether the model is one unit: by NO_WRAP, or by a smallest size of 0, as in accelerate."""
        return self.wrap == "NO_WRAP" or (self.wrap == "SIZE_BASED_WRAP" and self.min_num_params == 0)


SETTINGS: dict[KeyPath, str] = {each.metadata["path"]: each.name for each in fields(Settings) if each.metadata}
"""What a key's value is called here."""


def offloads(settings: Settings, device_type: str) -> bool:
    """Return whether shards are kept in host memory and copied to the device; on a CPU they are there anyway."""
    if settings.offload and device_type == "cpu":
        messages.say("fsdp_offload_params changes nothing without a GPU: parameters are in host memory already")
    return settings.offload and device_type != "cpu"


def settings_of(config: Config) -> Settings:
    """Translate a resolved Config."""
    named = {name: value_at(config, path) for path, name in SETTINGS.items()}
    if isinstance(named["reshard_after_forward"], str):
        del named["reshard_after_forward"]  # under FSDP1, where it is another name of the strategy
    named["sync_module_states"] = named["sync_module_states"] is not False or bool(named["ram_efficient"])
    kinds = ("param", "reduce", "output", "buffer", "master")
    dtypes = {kind: DTYPES[name] for kind in kinds if (name := getattr(config.precision, kind))}
    return Settings(
        **{name: value for name, value in named.items() if value is not None},
        dtypes=Dtypes(**dtypes),
        compiling=config.dynamo_config if config.dynamo_config.dynamo_backend != "NO" else None,
        float8=config.fp8_config if config.mixed_precision == "fp8" else None,
        tensor_plan=tuple(config.sharding.tensor_parallel_plan.items()),
    )
