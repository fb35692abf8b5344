"""Let `model.zero_grad()` clear the gradients of the shards between a pass and its backward, too.

FSDP2 leaves the outermost unit gathered there, so `model.parameters()` are tensors that have no gradients yet.
What `zero_grad` is to clear is with the shards: without this it is added to the next gradient, in silence.
"""

import functools
import weakref
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
    from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import gathered_now

    refs = [ref for model in (module, *models_of(nn.Module)) for ref in _groups_of(model)]
    pairs = [pair for ref in refs for pair in gathered_now(ref)]
    own = {id(param) for param in module.parameters()} if pairs else set()
    yield from (shard for gathered, shard in pairs if id(gathered) in own)


def _groups_of(model: nn.Module) -> "list[weakref.ref[Any]]":
    """Return the groups of a model's units; what was found once is known, for this stands in every step."""
    from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import group_refs

    if model not in _groups:
        found = [ref for part in model.modules() if is_unit(part) for ref in group_refs(part)]
        if not found:
            return []
        _groups[model] = found
    return _groups[model]


_groups: "weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Any]]]" = weakref.WeakKeyDictionary()


def _clear(shard: Any, *, set_to_none: bool) -> None:
    if shard.grad is None:
        return
    if set_to_none:
        shard.grad = None
    else:
        with torch.no_grad():
            shard.grad.detach_().zero_()
