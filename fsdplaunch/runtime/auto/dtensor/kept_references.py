"""Let parameters that a script took from its model before it was sharded stand for the shards.

Needed because `fully_shard` puts new parameters in the place of the full ones, while `.to` and `.cuda` keep them:
`params = list(model.parameters())`, given to an optimizer and later to `clip_grad_norm_`, has neither gradients
nor new values then, and nothing says so. Optimizers of torch's are changed over by `optimizers`; a library's own,
such as fastai's, hold parameters in ways that only they know.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.inspection.parameter_names import named_parameters
from fsdplaunch.runtime.sharding.optimizer_params import ORIGIN
from fsdplaunch.runtime.torch_internals.tensors import tree_map

_SHARD = "fsdplaunch_shard"
_OWN = frozenset({_SHARD, ORIGIN, "__torch_function__", "__dict__", "__weakref__", "__hash__"})
"""What a reference has itself; everything else is its shard's."""


class ShardReference(nn.Parameter):
    """A full parameter that something held when its model was sharded; every use of it is one of its shard.

    It keeps its identity, by which dicts know it.
    """

    def __getattribute__(self, name: str) -> Any:
        """Return the shard's attribute or method, its class as well."""
        return super().__getattribute__(name) if name in _OWN else getattr(_shard_of(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the shard, such as its gradient."""
        setattr(_shard_of(self), name, _resolved(value))

    def __delattr__(self, name: str) -> None:
        """Remove an attribute of the shard."""
        delattr(_shard_of(self), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch's, or a method, with shards in the place of references to them."""
        name = getattr(func, "__name__", "")
        own = args[0] if args else None
        args, kwargs = _resolved(args), _resolved(kwargs or {})
        if type(own) is ShardReference and getattr(torch.Tensor, name, None) is func:
            func = getattr(type(args[0]), name)  # operators are looked up at the class: the shards' have handlers
        return func(*args, **kwargs)


def _shard_of(reference: ShardReference) -> Any:
    return object.__getattribute__(reference, "__dict__")[_SHARD]


def _resolved(value: Any) -> Any:
    return tree_map(lambda each: _shard_of(each) if type(each) is ShardReference else each, value)


@contextmanager
def keeping_references(model: nn.Module) -> Iterator[None]:
    """Let every full parameter that is still held after the model is sharded inside stand for its shard.

    Args:
        model: Not sharded yet.
    """
    full = {name: weakref.ref(param) for name, param in named_parameters(model)}
    yield
    for name, shard in named_parameters(model):
        held = full[name]() if name in full else None
        if type(held) is nn.Parameter and isinstance(shard, DTensor):
            held.data = held.data.new_empty(0)  # or each rank would go on to hold the full model
            held.__dict__[_SHARD] = shard
            held.__class__ = ShardReference
