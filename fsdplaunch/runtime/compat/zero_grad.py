"""Let `model.zero_grad()` clear the gradients of the shards between a pass and its backward, too.

FSDP2 leaves the outermost unit gathered there, so `model.parameters()` are tensors that have no gradients yet.
What `zero_grad` is to clear is with the shards: without this it is added to the next gradient, in silence.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdplaunch.runtime.inspection.units import is_unit


def clear_gradients_of_shards() -> None:
    """Have every module's `zero_grad` clear the shards' gradients as well, whoever sharded it."""
    clear = nn.Module.zero_grad
    if hasattr(clear, "__wrapped__"):
        return

    @functools.wraps(clear)
    def clear_both(self: nn.Module, set_to_none: bool = True) -> None:
        clear(self, set_to_none)
        for shard in _shards_behind(self):
            _clear(shard, set_to_none=set_to_none)

    nn.Module.zero_grad = clear_both  # type: ignore[method-assign]


def _shards_behind(module: nn.Module) -> Iterator[Any]:
    """Yield the shards of the parameters that a module has gathered, by itself or as a part of a larger unit."""
    from fsdplaunch.runtime.sharding.registry import models_of
    from fsdplaunch.runtime.torch_internals.fsdp2 import gathered_parameters

    own = {id(param) for param in module.parameters()}
    parts = {id(part): part for model in (module, *models_of(nn.Module)) for part in model.modules()}
    for part in parts.values():
        if is_unit(part):
            yield from (shard for gathered, shard in gathered_parameters(part) if id(gathered) in own)


def _clear(shard: Any, *, set_to_none: bool) -> None:
    if shard.grad is None:
        return
    if set_to_none:
        shard.grad = None
    else:
        with torch.no_grad():
            shard.grad.detach_().zero_()
