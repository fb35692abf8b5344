"""Activation checkpointing: each block keeps its input only and computes the rest again in backward."""

from typing import Any

import torch
from torch import nn

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection.replace_modules import replace_modules
from fsdplaunch.runtime.sharding.blocks import class_name, find_blocks
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.sharding.wrap import Units
from fsdplaunch.runtime.torch_internals.modules import CheckpointImpl, checkpoint_wrapper, offload_wrapper


def checkpoint_blocks(model: nn.Module, units: Units, settings: Settings, device: torch.device) -> Units:
    """Wrap the model's blocks in place, before they are sharded, and return the units with the wrappers in them.

    Blocks are wrapped, whatever the wrap policy is: a policy may cut the model finer or not at all. The
    gathering then stands outside of the recomputation, so backward gathers each block once.

    Raises:
        ShardingError: The model has no blocks and no units, or fewer than every how many of them is to be wrapped.
    """
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):  # transformers' switch
        messages.say("the model's own gradient checkpointing is on, so fsdp_activation_checkpointing adds nothing")
        return units
    keep_no_cache(model)
    offload = settings.activation_offload and device.type != "cpu"
    if settings.activation_offload and not offload:
        messages.say("fsdp_activation_checkpointing_offload changes nothing without a GPU")
    every = settings.checkpoint_every
    blocks = _blocks(model, units, settings)
    if every > len(blocks):
        msg = f"sharding.checkpoint_every is {every}, and {class_name(model)} has {len(blocks)} blocks"
        raise ShardingError(msg, hint="set a smaller number")
    wrappers = {block: _wrapped(block, offload=offload) for block in blocks[every - 1 :: every]}
    replace_modules(model, wrappers)
    return {name: wrappers.get(unit, unit) for name, unit in units.items()}


def _blocks(model: nn.Module, units: Units, settings: Settings) -> list[nn.Module]:
    try:
        return list(find_blocks(model, settings.block_classes).values())
    except ShardingError:
        if not units or settings.wrap == "TRANSFORMER_BASED_WRAP":
            raise
        return list(units.values())


def _wrapped(block: nn.Module, *, offload: bool) -> nn.Module:
    wrapped = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    return offload_wrapper(wrapped) if offload else wrapped


def keep_no_cache(model: nn.Module) -> None:
    """Turn off the key-value cache of transformers models: computing a block twice would append to it twice."""
    configs: list[Any] = [vars(module).get("config") for module in model.modules()]
    cached = [config for config in configs if getattr(config, "use_cache", False) is True]
    for config in cached:
        config.use_cache = False
    if cached:
        messages.say("set the model's use_cache to false: it cannot be kept under activation checkpointing")
