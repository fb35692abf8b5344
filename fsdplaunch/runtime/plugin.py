"""`FullyShardedDataParallelPlugin`: the reference's fields, filled from the environment where code is silent."""

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from fsdplaunch.config.environment import decode, decode_with, parse_value
from fsdplaunch.config.schema.config import Config, KeyPath, keys_by_path
from fsdplaunch.config.schema.kinds import FALSE_WORDS, STATE_DICT, TRUE_WORDS
from fsdplaunch.errors import ShardingError, UsageError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.patch import once_imported
from fsdplaunch.runtime.sharding.settings import (
    DTYPES,
    SETTINGS,
    Dtypes,
    Settings,
    fsdp1_policy,
    fsdp2_policy,
    of_key,
    settings_of,
)
from fsdplaunch.runtime.sharding.wrap import find_blocks, torch_form
from fsdplaunch.runtime.torch_internals.fsdp import mend_flat_parameters, sharding_strategy, wrap_policy_runner


class JoinsAccelerate:
    """Stands between a class and `object`: Python lets such a class have other parents later."""


_POLICIES: dict[str, Any] = {
    "TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy,
    "SIZE_BASED_WRAP": size_based_auto_wrap_policy,
    "NO_WRAP": None,
}


def _key(path: str) -> Any:
    """Declare a field with the configuration's key behind it; `fsdp_config` is left out of the path."""
    return field(default=None, metadata=of_key(path))


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

    fsdp_version: int | None = _key("fsdp_version")
    sharding_strategy: Any = _key("fsdp_sharding_strategy")
    reshard_after_forward: Any = _key("fsdp_reshard_after_forward")
    backward_prefetch: Any = _key("fsdp_backward_prefetch")
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = _key("fsdp_auto_wrap_policy")
    cpu_offload: Any = _key("fsdp_offload_params")
    ignored_modules: Iterable[nn.Module | str] | str | None = _key("fsdp_ignored_modules")
    state_dict_type: Any = _key("fsdp_state_dict_type")
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool | None = _key("fsdp_limit_all_gathers")
    use_orig_params: bool | None = _key("fsdp_use_orig_params")
    param_init_fn: Callable[[nn.Module], Any] | None = None
    sync_module_states: bool | None = _key("fsdp_sync_module_states")
    forward_prefetch: bool | None = _key("fsdp_forward_prefetch")
    activation_checkpointing: bool | None = _key("fsdp_activation_checkpointing")
    cpu_ram_efficient_loading: bool | None = _key("fsdp_cpu_ram_efficient_loading")
    transformer_cls_names_to_wrap: list[str] | str | None = _key("fsdp_transformer_layer_cls_to_wrap")
    min_num_params: int | None = _key("fsdp_min_num_params")
    activation_checkpointing_offload: bool | None = _key("fsdp_activation_checkpointing_offload")
    dp_replicate_size: int | None = _key("parallelism_config.parallelism_config_dp_replicate_size")
    dp_shard_size: int | None = _key("parallelism_config.parallelism_config_dp_shard_size")
    master_dtype: Any = _key("precision.master")
    activation_checkpointing_every: int | None = _key("sharding.checkpoint_every")
    forward_methods: list[str] | str | None = _key("sharding.forward_methods")
    _config: Config = field(init=False, repr=False, compare=False)
    _wrap_given: bool = field(init=False, repr=False, compare=False, default=True)
    _float8: bool = field(init=False, repr=False, compare=False, default=False)

    def __post_init__(self) -> None:
        given = {name: _plain_or_none(name, getattr(self, name)) for name in PATHS}
        if given["fsdp_version"] is None and not _is_set("fsdp_version"):
            given["fsdp_version"] = 1  # as the reference has it
        self._config = _configured(given)
        unused = _unused_of(given, self._config)
        if unused:
            self._config = _configured(given | dict.fromkeys(unused))
        self._wrap_given = given["auto_wrap_policy"] is not None or _is_set("auto_wrap_policy")
        own = settings_of(self._config)
        if given["cpu_ram_efficient_loading"] is not None:
            load_on_first_ranks_only(own.ram_efficient)
        self._fill(own)
        self.set_state_dict_type()
        policy, other = self.mixed_precision_policy, "output_dtype" if own.version == 1 else "buffer_dtype"
        if isinstance(policy, Mapping) and policy.get(other) is not None:
            msg = f"fsdp_version {own.version} has no {other}"
            raise UsageError(msg, hint="leave it out, or set the other fsdp_version")
        self._set_dtypes(
            _dtypes_from(policy, own.dtypes), float8=_is_float8(policy) or (not policy and own.float8)
        )

    def _fill(self, own: Settings) -> None:
        """Give every field its final value: the configuration's, which holds what code set, as torch's object."""
        for name, path in PATHS.items():
            if path in SETTINGS and name not in _OBJECTS:
                setattr(self, name, getattr(own, SETTINGS[path]))
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
        self.cpu_offload = _offload_policy(self.cpu_offload, on=own.offload, one=one)
        given = self.ignored_modules
        self.ignored_modules = given if isinstance(given, str) else list(given) if given else own.ignored
        if not _is_function(self.auto_wrap_policy):
            self.auto_wrap_policy = _POLICIES[str(own.wrap)]
        if one and self.sync_module_states and self.param_init_fn is None:
            self.param_init_fn = allocate

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose how checkpoints hold the model, the present way when left out, and fit torch's options to it.

        Raises:
            UsageError: It is not such a type, or LOCAL_STATE_DICT under FSDP2.
        """
        wanted = self.state_dict_type if state_dict_type is None else state_dict_type
        name = state_dict_name(wanted)
        if name == "LOCAL_STATE_DICT" and self.fsdp_version != 1:
            msg = "fsdp_version 2 has no state_dict_type LOCAL_STATE_DICT"
            raise UsageError(msg, hint="use SHARDED_STATE_DICT")
        self.state_dict_type = StateDictType[name]
        self.state_dict_config = state_config(self.state_dict_type, self.state_dict_config)
        present = self.optim_state_dict_config
        self.optim_state_dict_config = state_config(self.state_dict_type, present, of_optimizer=True)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Bind a named wrap policy to a model, so that `auto_wrap_policy` is a function torch can use.

        Raises:
            ShardingError: A class to wrap is not in the model, or the model has no blocks.
        """
        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            try:
                blocks = find_blocks(model, self.transformer_cls_names_to_wrap or ())
            except ShardingError:
                if self._wrap_given or self.transformer_cls_names_to_wrap:
                    raise
                self.auto_wrap_policy = None  # the model has no blocks and nobody asked for them
                return
            classes = {type(block) for block in blocks.values()}
            # Accelerate looks at the names.
            self.transformer_cls_names_to_wrap = sorted(each.__name__ for each in classes)
            self.auto_wrap_policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            least = self.min_num_params
            self.auto_wrap_policy = partial(size_based_auto_wrap_policy, min_num_params=least) if least else None
        elif callable(self.auto_wrap_policy):
            self.auto_wrap_policy = torch_form(self.auto_wrap_policy)

    def set_mixed_precision(
        self, mixed_precision: str | torch.dtype, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Compute in a dtype, `bf16` or torch's object, unless a policy is there and `override` is not set.

        With `buffer_autocast` buffers stay in fp32 (FSDP1).

        Raises:
            UsageError: It is not a dtype.
        """
        if self.mixed_precision_policy is not None and not override:
            return
        name = str(plain(mixed_precision)).removeprefix("torch.")
        dtypes = _dtypes_from(name, settings_of(self._config).dtypes)
        dtypes = replace(dtypes, buffer=torch.float32) if buffer_autocast else dtypes
        self._set_dtypes(dtypes, float8=_is_float8(name))

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
        one = self.fsdp_version == 1
        self._float8 = bool(float8)
        self.master_dtype = dtypes.master
        self.mixed_precision_policy = dtypes.template
        self.validate_mixed_precision_policy()
        if dtypes.mixed:
            self.mixed_precision_policy = fsdp1_policy(dtypes) if one else fsdp2_policy(dtypes)

    def settings(self) -> Settings:
        """Return the frozen values that sharding works with: the configuration's, and the fields as they are now.

        Raises:
            UsageError: A field was set to something it cannot be.
        """
        self.validate_mixed_precision_policy()
        now = {name: _plain_or_none(name, getattr(self, name)) for name, path in PATHS.items() if path in SETTINGS}
        if self.fsdp_version == 1:
            del now["reshard_after_forward"]
        now["backward_prefetch"] = now["backward_prefetch"] or "NO_PREFETCH"
        values: dict[str, Any] = {
            SETTINGS[PATHS[name]]: parse_value(PATHS[name], value, name)
            for name, value in now.items()
            if value is not None
        }
        ignored, policy = self.ignored_modules, self.auto_wrap_policy
        values["ignored"] = ignored if ignored is None or isinstance(ignored, str) else tuple(ignored)
        values["wrap"] = next((name for name, own in _POLICIES.items() if own is policy), policy)
        return replace(
            settings_of(self._config),
            **values,
            float8=self._config.fp8_config if self._float8 else None,
            dtypes=_dtypes_from(
                self.mixed_precision_policy, Dtypes(master=_dtype_of(self.master_dtype, "master_dtype"))
            ),
            param_init_fn=None if self.param_init_fn is allocate else self.param_init_fn,
        )


PATHS: dict[str, KeyPath] = {
    each.name: each.metadata["path"] for each in fields(FullyShardedDataParallelPlugin) if each.metadata
}
"""The configuration key behind each field of the plugin that has one."""
_OBJECTS = ("reshard_after_forward", "auto_wrap_policy", "cpu_offload", "ignored_modules")
"""Fields that what code gives them is looked at in, once more."""


@cache
def ambient_plugin() -> FullyShardedDataParallelPlugin:
    """Return the plugin of the launch's configuration, made once per process."""
    return FullyShardedDataParallelPlugin(fsdp_version=decode().fsdp_config.fsdp_version)


def _configured(in_code: Mapping[str, Any]) -> Config:
    """Resolve the environment's configuration with what a script sets in code, None for nothing, on top of it."""
    given = {name: value for name, value in in_code.items() if value is not None}
    if not given:
        return decode()
    # Two names of one thing: what code sets under one wins over both.
    replaced = set()
    for one, other in itertools.permutations(("sharding_strategy", "reshard_after_forward")):
        value = given.get(one)
        if isinstance(value, str) and not value.isdigit() and value.lower() not in TRUE_WORDS | FALSE_WORDS:
            replaced.add(PATHS[other])
    values = {PATHS[name]: parse_value(PATHS[name], value, name) for name, value in given.items()}
    return decode_with(values, replaced=replaced)


def plain(value: Any) -> Any:
    """Return a torch enumeration's member as its name, a dtype as its short name; anything else as it is."""
    if isinstance(value, Enum):
        return value.name.lstrip("_")
    if isinstance(value, torch.dtype):
        return {dtype: name for name, dtype in DTYPES.items()}.get(value, value)
    return value


def state_dict_name(given: Any) -> str:
    """Return the configuration's name of a kind of state dict: a name, its first word, a code, `StateDictType`."""
    value = plain(given)
    word = value.strip().upper() if isinstance(value, str) else ""
    try:
        return str(STATE_DICT.parse(f"{word}_STATE_DICT" if word in ("FULL", "SHARDED", "LOCAL") else value))
    except ValueError:
        msg = f"state_dict_type must be {STATE_DICT.expects}, got {given!r}"
        raise UsageError(msg) from None


_OPTIONS: dict[StateDictType, tuple[Any, Any]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}
"""Torch's classes of options: the model's, the optimizer's."""


def state_config(kind: StateDictType, present: Any, *, of_optimizer: bool = False) -> Any:
    """Return options for a model's or an optimizer's state dict; those present if they are of the right class."""
    wanted = _OPTIONS[kind][of_optimizer]
    if isinstance(present, wanted):
        return present
    mend_flat_parameters()
    if kind is StateDictType.FULL_STATE_DICT:
        return wanted(offload_to_cpu=True, rank0_only=True)
    return wanted(offload_to_cpu=True) if kind is StateDictType.SHARDED_STATE_DICT else wanted()


def _dtype_of(value: Any, what: str) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    return DTYPES[parse_value(("precision", "param"), value, what)]


_DTYPE_FIELDS = {f"{kind}_dtype": kind for kind in ("param", "reduce", "output", "buffer")}


def _dtypes_from(policy: Any, base: Dtypes) -> Dtypes:
    """Read `mixed_precision_policy` in any of its forms: a name, a mapping, one of torch's two classes.

    A name sets what the configuration's mixed_precision sets: computation in that dtype, gradients summed in
    fp32, shards kept in fp32. A mapping or an object sets each dtype itself.
    """
    if policy is None:
        return base
    if isinstance(policy, str):
        word = "bf16" if _is_float8(policy) else policy  # what float8 leaves to others is computed in bf16
        compute = None if word.strip().lower() == "no" else _dtype_of(word, "mixed_precision_policy")
        lower = compute not in (None, torch.float32)
        reduce, master = (None if compute is None else torch.float32), (torch.float32 if lower else base.master)
        return replace(base, param=compute, reduce=reduce, buffer=compute, master=master)
    template = policy if isinstance(policy, MixedPrecision | MixedPrecisionPolicy) else None
    if template is not None:
        policy = {name: getattr(policy, name, None) for name in _DTYPE_FIELDS}
    if not isinstance(policy, Mapping) or set(policy) - set(_DTYPE_FIELDS):
        msg = f"mixed_precision_policy must be a name, or a mapping of {', '.join(_DTYPE_FIELDS)}, got {policy!r}"
        raise UsageError(msg)
    dtypes = {_DTYPE_FIELDS[key]: _dtype_of(value, key) for key, value in policy.items()}
    lower = dtypes.get("param") not in (None, torch.float32)
    master = base.master or (torch.float32 if lower else None)
    return replace(Dtypes(master=master, template=template), **dtypes)


def _is_float8(policy: Any) -> bool:
    return isinstance(policy, str) and policy.strip().lower() == "fp8"


def allocate(module: nn.Module) -> nn.Module:
    """Give a module's own tensors storage, without values, where this worker computes."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    return module.to_empty(device=device, recurse=False)


def _is_function(policy: Any) -> bool:
    return callable(policy) or wrap_policy_runner(policy) is not None


def _plain_or_none(name: str, value: Any) -> Any:
    """Return a field's value as the configuration would hold it; None for objects that it cannot hold."""
    if isinstance(value, CPUOffload):
        return value.offload_params
    if isinstance(value, OffloadPolicy):
        return isinstance(value, CPUOffloadPolicy)
    if name == "ignored_modules" and not isinstance(value, str):
        return None
    return None if name == "auto_wrap_policy" and _is_function(value) else plain(value)


def _offload_policy(given: Any, *, on: bool, one: bool) -> CPUOffload | OffloadPolicy:
    """Return torch's object for offloading, for FSDP1 if `one`: what the field holds, or one made as `on` says."""
    if isinstance(given, CPUOffload if one else OffloadPolicy):
        kept: CPUOffload | OffloadPolicy = given
        return kept
    if isinstance(given, CPUOffload | OffloadPolicy):
        msg = f"cpu_offload must not be {type(given).__name__} under fsdp_version {1 if one else 2}"
        raise UsageError(msg, hint="give a flag, or the other class")
    if one:
        return CPUOffload(offload_params=on)
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if on else OffloadPolicy()


_OBSOLETE = ("backward_prefetch", "use_orig_params", "limit_all_gathers")
"""Fields of FSDP1 that change nothing under FSDP2; scripts set them for both."""
_FSDP2_DOES = {"backward_prefetch": "BACKWARD_PRE"}  # what FSDP2 always does, by the field that asks FSDP1 for it


def _is_set(field: str) -> bool:
    return bool(os.environ.get(keys_by_path()[PATHS[field]].env))


def _unused_of(given: Mapping[str, Any], config: Config) -> list[str]:
    """Name the fields that change nothing under this FSDP version; raise for a value that would be lost."""
    fsdp, one = config.fsdp_config, config.fsdp_config.fsdp_version == 1
    shown = {name: _shown(name, given[name], fsdp.fsdp_version) for name in PATHS}
    missing = [what for name, what in shown.items() if what and name not in _OBSOLETE]
    if one and isinstance(given["reshard_after_forward"], bool):
        missing.append("flag for reshard_after_forward")
    if not one and isinstance(fsdp.fsdp_reshard_after_forward, str):
        missing.append(f"reshard_after_forward {fsdp.fsdp_reshard_after_forward}")
    if missing:
        msg = f"fsdp_version {fsdp.fsdp_version} has no {missing[0]}"
        raise UsageError(msg, hint="leave it out, or set the other fsdp_version")
    needing = {
        "activation_checkpointing_offload": fsdp.fsdp_activation_checkpointing_offload,
        "activation_checkpointing_every": config.sharding.checkpoint_every > 1,
    }
    for name, wanted in needing.items():
        if wanted and not fsdp.fsdp_activation_checkpointing:
            msg = f"{name} needs activation_checkpointing"
            raise UsageError(msg)
    unused = {name: shown[name] for name in _OBSOLETE if shown[name]}
    for what in unused.values():
        messages.say(f"{what} changes nothing under fsdp_version {fsdp.fsdp_version}")
    return list(unused)


def _shown(name: str, given: Any, version: int | None) -> str | None:
    """Return a field with its value if this FSDP version has no such key, by the schema; None if it has."""
    spec = keys_by_path()[PATHS[name]]
    value = None if given is None else parse_value(spec.path, given, name)
    if version in spec.key.versions or value in (None, spec.default, _FSDP2_DOES.get(name)):
        return None
    return {True: name, False: f"{name}=False"}.get(value, f"{name} {value}")


def load_on_first_ranks_only(on: bool) -> None:
    """Set whether transformers loads pretrained weights on each node's first rank only.

    `from_pretrained` and this package read the same variable; it takes this no other way.
    """
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true" if on else "false"


def _join(dataclasses: Any) -> None:
    """Make the plugin a child of accelerate's class of this name: `Accelerator(fsdp_plugin=...)` asks for one."""
    ours, theirs = FullyShardedDataParallelPlugin, dataclasses.FullyShardedDataParallelPlugin
    if not issubclass(ours, theirs):
        ours.__bases__ = (*ours.__bases__, theirs)


once_imported("accelerate.utils.dataclasses", _join)
