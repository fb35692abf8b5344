"""Let parameters that a script took from its model before it was sharded stand for the shards.

Needed because `fully_shard` puts new parameters in the place of the full ones, while `.to` and `.cuda` keep them:
`params = list(model.parameters())`, given to an optimizer and later to `clip_grad_norm_`, has neither gradients
nor new values then. `torch.utils.swap_tensors` cannot exchange the two: DTensors have other slots.
"""

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.inspection.parameter_names import named_parameters
from fsdplaunch.runtime.inspection.units import is_unit, original_class
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import being_built, script_line
from fsdplaunch.runtime.sharding.optimizer_params import ORIGIN
from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import places_of_shards
from fsdplaunch.runtime.torch_internals.tensors import tree_map
from fsdplaunch.runtime.torch_internals.wrappers import is_made_by_compiler

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
        setattr(_shard_of(self), name, with_shards(value))

    def __delattr__(self, name: str) -> None:
        """Remove an attribute of the shard."""
        delattr(_shard_of(self), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch's, or a method, with shards in the place of references to them."""
        return func(*with_shards(args), **with_shards(kwargs or {}))


def _shard_of(reference: ShardReference) -> Any:
    return object.__getattribute__(reference, "__dict__")[_SHARD]


def with_shards(value: Any) -> Any:
    """Return lists, tuples and dicts of values with shards in the place of references to them."""
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


@contextmanager
def refusing_renames(hook_context: HookContext) -> Iterator[None]:
    """Refuse to give a shard another name, as pruning and parametrizations do: torch gathers it by its first.

    Torch itself registers shards in every pass, by the names that they have.
    """

    def register(original: Any) -> Any:
        @functools.wraps(original)
        def register_parameter(self: nn.Module, name: str, param: Any) -> None:
            if isinstance(param, DTensor) and not is_made_by_compiler(self):
                _check_name(self, name, param, hook_context)
            original(self, name, param)

        return register_parameter

    with replaced(nn.Module, "register_parameter", register):
        yield


def _check_name(module: nn.Module, name: str, param: DTensor, hook_context: HookContext) -> None:
    for model, line in hook_context.models.items():
        for unit in filter(is_unit, model.modules()):
            for shard, places in places_of_shards(unit):
                if shard is param and not any(module is home and name == known for home, known in places):
                    raise late_parameter(model, name, line)


def late_parameter(model: nn.Module, name: str, line: str) -> ShardingError:
    """Return the error for a parameter that a model got after it was sharded."""
    now = script_line()
    msg = f"{now}: {name} of {original_class(model).__name__} appeared after the model was sharded at {line}"
    hint = (
        f"complete the model before {line}; or call fsdplaunch.prepare(model, optimizer) in the script when it is"
    )
    if now == line and any(each is model for each in being_built()):  # the script cannot be changed there
        hint = (
            f"{line} builds an optimizer before its model is complete, inside of a library: after it, give"
            " fsdplaunch.prepare each part that the library computes with, and the optimizers"
            " (fsdplaunch.prepare(model.actor, model.critic, model.actor.optimizer, model.critic.optimizer))"
        )
    return ShardingError(msg, hint=hint)
