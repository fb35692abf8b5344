"""`FullyShardedDataParallelPlugin`: the reference's fields, filled from the environment where code is silent."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    MixedPrecisionPolicy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from fsdplaunch.config.environment import decode
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.kinds import PREFETCH, STATE_DICT, STRATEGY
from fsdplaunch.errors import ShardingError, UsageError
from fsdplaunch.runtime.compat.accelerate.plugin import JoinsAccelerate, join_accelerate
from fsdplaunch.runtime.compat.transformers_loading import load_on_first_ranks_only
from fsdplaunch.runtime.plugin.plugin_checks import REFERENCE_VERSION, check_given, is_set
from fsdplaunch.runtime.plugin.plugin_objects import (
    allocate,
    is_function,
    names_in,
    offload_policy,
    offloads_params,
    plain_or_none,
)
from fsdplaunch.runtime.plugin.plugin_values import (
    PATHS,
    check_policy,
    configured,
    dtype_of,
    dtypes_from,
    is_float8,
    plain,
    policy_of,
    state_dict_name,
)
from fsdplaunch.runtime.plugin.wrap_policy import torch_form
from fsdplaunch.runtime.sharding.blocks import find_blocks
from fsdplaunch.runtime.sharding.settings import Dtypes, Settings, float8_of, settings_of
from fsdplaunch.runtime.state_dict.options import optimizer_config, state_config
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import sharding_strategy

_POLICIES: dict[str, Any] = {
    "TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy,
    "SIZE_BASED_WRAP": size_based_auto_wrap_policy,
    "NO_WRAP": None,
}

_PLAIN = {
    "fsdp_version": "version",
    "limit_all_gathers": "limit_all_gathers",
    "use_orig_params": "use_orig_params",
    "sync_module_states": "sync_module_states",
    "forward_prefetch": "forward_prefetch",
    "activation_checkpointing": "activation_checkpointing",
    "activation_checkpointing_offload": "activation_offload",
    "cpu_ram_efficient_loading": "ram_efficient",
    "min_num_params": "min_num_params",
    "dp_replicate_size": "replicate_size",
    "dp_shard_size": "shard_size",
    "activation_checkpointing_every": "checkpoint_every",
}
"""Fields that hold the configuration's own value, and what Settings calls them."""


@dataclass
class FullyShardedDataParallelPlugin(JoinsAccelerate):
    """How models are sharded. A field left None takes the value of the launch's configuration.

    The configuration reaches a worker as environment variables; values given here win over them. After
    construction every field holds the value that will be used, as torch's own object where torch has one. Where
    accelerate is imported, this is a child of its class of this name: `Accelerator(fsdp_plugin=...)` takes it.

    Attributes:
        fsdp_version: 1 (FullyShardedDataParallel) or 2 (fully_shard); 1 where code and environment set none.
        sharding_strategy: A name, a code 1-5, or `ShardingStrategy`; None under FSDP2 after construction.
        reshard_after_forward: FSDP2: a flag or a number of ranks. FSDP1: another name for the strategy.
        backward_prefetch: A name, a code, or `BackwardPrefetch`; None means no prefetch. FSDP1.
        mixed_precision_policy: `bf16`, `fp16`, `fp32`, `fp8`; a mapping of param_dtype, reduce_dtype, buffer_dtype
            and output_dtype; `MixedPrecision` or `MixedPrecisionPolicy`.
        auto_wrap_policy: `transformer_based_wrap`, `size_based_wrap`, `no_wrap`, or a function: one of torch's
            form, or one from a module to whether it is a unit.
        cpu_offload: A flag, `CPUOffload` (FSDP1) or `CPUOffloadPolicy` (FSDP2).
        ignored_modules: Modules, or a regular expression that matches their full names, or several.
        state_dict_type: `full_state_dict`, `local_state_dict`, `sharded_state_dict`, or `StateDictType`.
        state_dict_config: Torch's options for the model's state dict; made to fit the type when left out.
        optim_state_dict_config: The same for the optimizer's.
        limit_all_gathers: FSDP1: keep the host from queueing too many gathers.
        use_orig_params: FSDP1: show the optimizer the model's own parameters.
        param_init_fn: Gives values to a module whose parameters have no storage on any rank. Under FSDP1 with
            sync_module_states a function that gives storage only, for accelerate's use.
        sync_module_states: Send rank 0's parameters and buffers to all ranks before sharding; always so under
            cpu_ram_efficient_loading, where only rank 0 has them.
        forward_prefetch: Gather the next unit while the current one computes forward.
        activation_checkpointing: Compute each block's activations again in backward.
        cpu_ram_efficient_loading: Only rank 0 has weights, the others receive them.
        transformer_cls_names_to_wrap: Class names of the blocks, as a list or separated by commas.
        min_num_params: Smallest number of parameters size_based_wrap makes a unit of.
        activation_checkpointing_offload: Move the blocks' saved inputs to host memory.
        dp_replicate_size: Replicas of the model; -1 takes what dp_shard_size leaves.
        dp_shard_size: Ranks per replica; -1 takes what dp_replicate_size leaves.
        master_dtype: The dtype shards and optimizer state are kept in.
        activation_checkpointing_every: Compute only every n-th block again, 2 for half of them.
        forward_methods: Names of methods, beside forward and generate, that compute with the parameters.

    Raises:
        UsageError: A value is not one the field takes, or the FSDP version has no such thing.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module | str] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool | None = None
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], Any] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None
    activation_checkpointing_offload: bool | None = None
    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    master_dtype: Any = None
    activation_checkpointing_every: int | None = None
    forward_methods: list[str] | str | None = None
    _config: Config = field(init=False, repr=False, compare=False)
    _configured: Settings = field(init=False, repr=False, compare=False)
    _wrap_given: bool = field(init=False, repr=False, compare=False, default=True)
    _float8: bool = field(init=False, repr=False, compare=False, default=False)

    def __post_init__(self) -> None:
        given = {name: plain_or_none(name, getattr(self, name)) for name in PATHS}
        if given["fsdp_version"] is None and not is_set("fsdp_version"):
            given["fsdp_version"] = REFERENCE_VERSION
        self._config = configured(given)
        unused = check_given(given, self._config)
        if unused:
            self._config = configured(given | dict.fromkeys(unused))
        self._configured = settings_of(self._config)
        self._wrap_given = given["auto_wrap_policy"] is not None or is_set("auto_wrap_policy")
        if given["cpu_ram_efficient_loading"] is not None:
            load_on_first_ranks_only(bool(self._configured.ram_efficient))
        self._fill()
        self.set_state_dict_type()
        policy, own = self.mixed_precision_policy, self._configured
        check_policy(policy, own.version)
        self._set_dtypes(dtypes_from(policy, own.dtypes), float8=is_float8(policy) or (not policy and own.float8))

    def _fill(self) -> None:
        """Give every field its final value: the configuration's, which holds what code set, as torch's object."""
        own = self._configured
        for name, setting in _PLAIN.items():
            setattr(self, name, getattr(own, setting))
        one = own.version == 1
        strategy = sharding_strategy(own.strategy)
        self.sharding_strategy = strategy if one else None
        named = strategy if self.reshard_after_forward is not None else None  # FSDP1: another name of the strategy
        self.reshard_after_forward = named if one else own.reshard_after_forward
        prefetch = own.backward_prefetch
        self.backward_prefetch = None if prefetch == "NO_PREFETCH" else BackwardPrefetch[prefetch]
        self.state_dict_type = StateDictType[own.state_dict_type]
        self.transformer_cls_names_to_wrap = list(own.block_classes) or None
        self.forward_methods = list(own.forward_methods)
        self.cpu_offload = offload_policy(self.cpu_offload, on=own.offload, one=one)
        if self.ignored_modules is None:
            self.ignored_modules = cast("str | None", own.ignored)
        elif not isinstance(self.ignored_modules, str):
            self.ignored_modules = list(self.ignored_modules)
        if not is_function(self.auto_wrap_policy):
            self.auto_wrap_policy = _POLICIES[str(own.wrap)]
        if one and self.sync_module_states and self.param_init_fn is None:
            self.param_init_fn = allocate

    @property
    def process_group_timeout(self) -> timedelta:
        """Return how long a collective may wait; read only, since the process group is made with it."""
        return timedelta(seconds=self._config.launch.process_group_timeout_seconds)

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose how checkpoints hold the model, and fit torch's options to it.

        Args:
            state_dict_type: A name, a code, or `StateDictType`; the present one when left out.

        Raises:
            UsageError: It is no such type, or LOCAL_STATE_DICT under FSDP2.
        """
        wanted = self.state_dict_type if state_dict_type is None else state_dict_type
        name = state_dict_name(wanted)
        if name == "LOCAL_STATE_DICT" and self.fsdp_version != 1:
            msg = "fsdp_version 2 has no state_dict_type LOCAL_STATE_DICT"
            raise UsageError(msg, hint="use SHARDED_STATE_DICT")
        self.state_dict_type = StateDictType[name]
        self.state_dict_config = state_config(self.state_dict_type, self.state_dict_config)
        self.optim_state_dict_config = optimizer_config(self.state_dict_type, self.optim_state_dict_config)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Bind a named wrap policy to a model, so that `auto_wrap_policy` is a function torch can use.

        Raises:
            ShardingError: A class to wrap is not in the model, or the model has no blocks.
        """
        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            classes = self._classes_of(model)
            self.auto_wrap_policy = (
                partial(transformer_auto_wrap_policy, transformer_layer_cls=classes) if classes else None
            )
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            least = self.min_num_params
            self.auto_wrap_policy = partial(size_based_auto_wrap_policy, min_num_params=least) if least else None
        elif callable(self.auto_wrap_policy):
            self.auto_wrap_policy = torch_form(self.auto_wrap_policy)

    def _classes_of(self, model: nn.Module) -> set[type[nn.Module]]:
        """Return the classes of a model's blocks, and keep their names, which is what accelerate looks at.

        None when the model has no blocks and nobody asked for them.
        """
        try:
            blocks = find_blocks(model, self.transformer_cls_names_to_wrap or ())
        except ShardingError:
            if self._wrap_given or self.transformer_cls_names_to_wrap:
                raise
            return set()
        classes = {type(block) for block in blocks.values()}
        self.transformer_cls_names_to_wrap = sorted(each.__name__ for each in classes)
        return classes

    def set_mixed_precision(
        self, mixed_precision: str | torch.dtype, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Compute in a dtype, unless a policy is there already.

        Args:
            mixed_precision: `bf16`, `fp16`, `fp32`, `fp8`, or torch's object.
            buffer_autocast: Keep buffers in fp32 (FSDP1).
            override: Replace a policy that is there.

        Raises:
            UsageError: It is no dtype.
        """
        if self.mixed_precision_policy is not None and not override:
            return
        name = str(plain(mixed_precision)).removeprefix("torch.")
        dtypes = dtypes_from(name, self._configured.dtypes)
        dtypes = replace(dtypes, buffer=torch.float32) if buffer_autocast else dtypes
        self._set_dtypes(dtypes, float8=is_float8(name))

    def validate_mixed_precision_policy(self) -> None:
        """Check that the policy is of the class this FSDP version uses.

        Raises:
            UsageError: It is not.
        """
        wanted = MixedPrecision if self.fsdp_version == 1 else MixedPrecisionPolicy
        if self.mixed_precision_policy is not None and not isinstance(self.mixed_precision_policy, wanted):
            msg = f"mixed_precision_policy must be {wanted.__name__} under fsdp_version {self.fsdp_version}"
            raise UsageError(msg, hint=f"got {self.mixed_precision_policy!r}")

    def _set_dtypes(self, dtypes: Dtypes, *, float8: object) -> None:
        self._float8 = bool(float8)
        self.master_dtype = dtypes.master
        self.mixed_precision_policy = policy_of(dtypes, self._configured.version)

    def settings(self) -> Settings:
        """Return the frozen values that sharding works with: the configuration's, and the fields as they are now.

        Raises:
            UsageError: A field was set to something it cannot be.
        """
        self.validate_mixed_precision_policy()
        ignored, own_strategy = self.ignored_modules, self._configured.strategy
        own = {setting: getattr(self, name) for name, setting in _PLAIN.items()}
        fields: dict[str, Any] = {setting: value for setting, value in own.items() if value is not None}
        return replace(
            self._configured,
            **fields,
            strategy=STRATEGY.parse(plain(self.sharding_strategy or own_strategy)),
            reshard_after_forward=True if self.fsdp_version == 1 else self.reshard_after_forward,
            offload=offloads_params(self.cpu_offload),
            wrap=_wrap_name(self.auto_wrap_policy),
            block_classes=tuple(names_in(self.transformer_cls_names_to_wrap)),
            backward_prefetch=PREFETCH.parse(plain(self.backward_prefetch) or "NO_PREFETCH"),
            state_dict_type=STATE_DICT.parse(plain(self.state_dict_type)),
            ignored=ignored if ignored is None or isinstance(ignored, str) else tuple(ignored),
            forward_methods=tuple(names_in(self.forward_methods)),
            float8=float8_of(self._config) if self._float8 else None,
            dtypes=dtypes_from(
                self.mixed_precision_policy, Dtypes(master=dtype_of(self.master_dtype, "master_dtype"))
            ),
            param_init_fn=None if self.param_init_fn is allocate else self.param_init_fn,
        )


@cache
def ambient_plugin() -> FullyShardedDataParallelPlugin:
    """Return the plugin of the launch's configuration, made once per process."""
    return FullyShardedDataParallelPlugin(fsdp_version=decode().fsdp_config.fsdp_version)


join_accelerate(FullyShardedDataParallelPlugin)


def _wrap_name(policy: Any) -> Any:
    """Return the policy's name if it is one of ours that no model was bound to yet, else the function."""
    return next((name for name, own in _POLICIES.items() if own is policy), policy)
