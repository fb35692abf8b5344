"""How a sharded model computes: checkpointed blocks, torch.compile, float8 layers, methods other than forward."""

import copy
import functools
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, register_fsdp_forward_method

from fsdplaunch.config.schema.kinds import DYNAMO
from fsdplaunch.config.schema.sharding_sections import DynamoConfig
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection.units import replace_modules
from fsdplaunch.runtime.patch import own_attribute
from fsdplaunch.runtime.sharding.ignored import IgnoredParts
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.sharding.wrap import Units, class_name, find_blocks
from fsdplaunch.runtime.torch_internals.modules import CheckpointImpl, checkpoint_wrapper, offload_wrapper


def checkpoint_blocks(model: nn.Module, units: Units, settings: Settings, device: torch.device) -> Units:
    """Wrap the model's blocks in place, before they are sharded, and return the units with the wrappers in them.

    Blocks are wrapped, whatever the wrap policy is: a policy may cut the model finer or not at all. The
    gathering then stands outside of the recomputation, so backward gathers each block once.
    """
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):  # transformers' switch
        messages.say("the model's own gradient checkpointing is on, so fsdp_activation_checkpointing adds nothing")
        return units
    keep_no_cache(model)
    offload = settings.activation_offload and device.type != "cpu"
    if settings.activation_offload and not offload:
        messages.say("fsdp_activation_checkpointing_offload changes nothing without a GPU")
    try:
        blocks = list(find_blocks(model, settings.block_classes).values())
    except ShardingError:
        if not units or settings.wrap == "TRANSFORMER_BASED_WRAP":
            raise
        blocks = list(units.values())
    every = settings.checkpoint_every
    if every > len(blocks):
        msg = f"sharding.checkpoint_every is {every}, and {class_name(model)} has {len(blocks)} blocks"
        raise ShardingError(msg, hint="set a smaller number")
    wrappers: dict[nn.Module, nn.Module] = {}
    for block in blocks[every - 1 :: every]:
        wrapped = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        wrappers[block] = offload_wrapper(wrapped) if offload else wrapped
    replace_modules(model, wrappers)
    return {name: wrappers.get(unit, unit) for name, unit in units.items()}


def keep_no_cache(model: nn.Module) -> None:
    """Turn off the key-value cache of transformers models: computing a block twice would append to it twice."""
    configs: list[Any] = [vars(module).get("config") for module in model.modules()]
    cached = [config for config in configs if getattr(config, "use_cache", False) is True]
    for config in cached:
        config.use_cache = False
    if cached:
        messages.say("set the model's use_cache to false: it cannot be kept under activation checkpointing")


def compile_forwards(modules: Iterable[nn.Module], settings: Settings, *, regional: bool) -> None:
    """Compile the forward of each module, recomputation included, and nothing of the gathering around it.

    The methods are exchanged, not the modules, so that no name in the model changes. Blocks of one class share
    what was compiled for the first. Given are the units before they are sharded (`regional`), or the model once
    they are: settings say which of both.
    """
    how = settings.compiling
    if how is None or how.dynamo_use_regional_compilation is not regional:
        return
    backends = torch.compiler.list_backends(exclude_tags=())
    if how.dynamo_backend.lower() not in backends:
        msg = f"dynamo_backend {how.dynamo_backend} is not one this torch has"
        known = [name for name in DYNAMO.choices if name.lower() in backends]
        raise ShardingError(msg, hint=f"it has {', '.join(known)}")
    chosen = list(modules)
    if not chosen:
        msg = "dynamo_use_regional_compilation compiles blocks, and this model has none"
        raise ShardingError(msg, hint="leave it out, or choose a wrap policy other than NO_WRAP")
    for module in chosen:
        module.__dict__["forward"] = CompiledForward(module, how, module.__dict__.get("forward"))


class CompiledForward:
    """A module's forward, compiled when it is first called; a copy of the module gets one of its own."""

    def __init__(self, module: nn.Module, how: DynamoConfig, given: Callable[..., Any] | None = None) -> None:
        self.module = module
        self.how = how
        self.given = given
        self.plain = given or MethodType(type(module).forward, module)
        self.run: Callable[..., Any] | None = None
        functools.update_wrapper(self, self.plain, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute; what is compiled is the class's forward, unless the module was given another."""
        if self.run is None:
            how = self.how
            self.run = torch.compile(
                self.plain,
                backend=how.dynamo_backend.lower(),
                mode=how.dynamo_mode if how.dynamo_backend == "INDUCTOR" else None,
                fullgraph=how.dynamo_use_fullgraph,
                dynamic=True if how.dynamo_use_dynamic else None,
            )
        return self.run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledForward":
        """Return one that computes with the copy of the module, not with this module."""
        return CompiledForward(copy.deepcopy(self.module, memo), self.how, copy.deepcopy(self.given, memo))


_MULTIPLE = 16  # what float8 matrix products need both sides of a matrix to be a multiple of


def convert_to_float8(model: nn.Module, settings: Settings, out: IgnoredParts) -> int:
    """Exchange a model's linear layers for float8 ones with the same parameters, in place; count them.

    The first and the last linear layer stay, where float8 costs accuracy, and with them layers that cannot be
    padded or are not sharded. Everything else computes in the configured dtype.
    """
    if settings.float8 is None:
        return 0
    if settings.version == 1:
        msg = "mixed_precision fp8 needs fsdp_version 2"
        raise ShardingError(msg, hint="set fsdp_version: 2, or mixed_precision: bf16")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        msg = f"mixed_precision fp8 needs torchao, which cannot be imported: {error}"
        raise ShardingError(msg, hint="pip install torchao, or set mixed_precision: bf16") from None
    how = settings.float8
    config = Float8LinearConfig(
        enable_fsdp_float8_all_gather=how.enable_fsdp_float8_all_gather, pad_inner_dim=how.pad_inner_dim
    )
    ignored = out.below()
    linear = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m not in ignored}
    ends = set(list(linear)[:1] + list(linear)[-1:])
    chosen = {
        name
        for name, layer in linear.items()
        if name not in ends
        and (how.pad_inner_dim or (layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0))
    }
    done = sum(type(module).__name__ == "Float8Linear" for module in model.modules())
    if not chosen and not done:
        msg = f"mixed_precision fp8: no linear layer of {type(model).__name__} can compute in float8"
        raise ShardingError(msg, hint="use mixed_precision: bf16")
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=config)
    return len(chosen) + done


def forward_methods(model: nn.Module, settings: Settings) -> tuple[str, ...]:
    """Return the methods to gather parameters for: those configured, and generate where the model has it."""
    for name in settings.forward_methods:
        if not callable(getattr(model, name, None)):
            msg = f"sharding.forward_methods: {class_name(model)} has no method {name}"
            raise ShardingError(msg, hint="name methods of the model that prepare is given")
    own = ("generate",) if callable(getattr(model, "generate", None)) else ()
    return tuple(dict.fromkeys((*own, *settings.forward_methods)))


def register(sharded: nn.Module, model: nn.Module, names: tuple[str, ...]) -> None:
    """Make methods of a model gather the root's parameters first, as forward does, through FSDP1's wrapper too."""
    for name in names:
        if isinstance(sharded, FullyShardedDataParallel):
            object.__setattr__(sharded, name, partial(_as_forward, sharded, model, name))
        else:
            register_fsdp_forward_method(sharded, name)


def _as_forward(
    wrapper: FullyShardedDataParallel, model: nn.Module, name: str, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a method in the place of the model's forward, so that the wrapper does for it what it does for forward.

    The method may call the model itself, whose forward is back in its place by then.
    """
    own = model.__dict__.get("forward") or MethodType(type(model).forward, model)

    def run(*inner_args: Any, **inner_kwargs: Any) -> Any:
        with own_attribute(model, "forward", own):
            return getattr(model, name)(*inner_args, **inner_kwargs)

    with own_attribute(model, "forward", run):
        return wrapper(*args, **kwargs)
