"""FSDP2's units: what they are recognised by, and how they get the class back that the script gave them.

Needed because `fully_shard` changes the class of each unit, so that `type(module) is nn.Linear` no longer holds,
while torch's methods for units work on that class only.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.inspection.parameter_names import parameters_of
from fsdplaunch.runtime.torch_internals.modules import MOVE_METHOD

_sharded_class: "weakref.WeakKeyDictionary[nn.Module, type]" = weakref.WeakKeyDictionary()
"""The class that `fully_shard` made, of each unit that has its own back."""


def is_unit(module: Any) -> bool:
    """Return whether FSDP2 gathers this module's parameters as one, whatever class it shows."""
    return isinstance(module, FSDPModule) or (isinstance(module, nn.Module) and module in _sharded_class)


def is_sharded(module: Any) -> bool:
    """Return whether a module is sharded as one unit or wrapped, by either FSDP version, by whomever."""
    return is_unit(module) or isinstance(module, FullyShardedDataParallel)


def fsdp1_wrappers(model: nn.Module) -> list[FullyShardedDataParallel]:
    """Return the wrappers of FSDP1 in a model, outermost first; [] where it is not sharded so."""
    return [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]


def has_shards(model: nn.Module) -> bool:
    """Return whether any of a model's parameters is a shard (DTensor)."""
    return any(isinstance(param, DTensor) for param in parameters_of(model))


def is_over_all_ranks(tensor: DTensor) -> bool:
    """Return whether every rank of the run has a part of a tensor, or a replica of one."""
    return tensor.device_mesh.size() == dist.get_world_size()


def original_class(module: nn.Module) -> type:
    """Return the class that a module had before `fully_shard`."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def restore_classes(model: nn.Module) -> None:
    """Give every unit of a model its own class back; torch's methods for units stay, as the instance's.

    Args:
        model: Sharded by `fully_shard`.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _sharded_class[module] = type(module)
            for name in _unit_methods():
                module.__dict__[name] = _as_unit(weakref.ref(module), name)
            module.__class__ = original_class(module)


@contextmanager
def sharded_classes(module: nn.Module) -> Iterator[None]:
    """Show a module and the units inside of it as `fully_shard` left them, for torch's own checks of the class."""
    changed = [(each, type(each)) for each in module.modules() if each in _sharded_class]
    for each, _ in changed:
        each.__class__ = _sharded_class[each]
    try:
        yield
    finally:
        for each, own in changed:
            each.__class__ = own


def reshard(model: nn.Module) -> None:
    """Free what is gathered of a model: its parameters are the shards again."""
    for module in model.modules():
        if is_unit(module):
            unit: Any = module
            unit.reshard()


@functools.cache
def _unit_methods() -> tuple[str, ...]:
    """Return the names of the methods that torch gives units, but for those that every class has."""
    return tuple(n for n, value in vars(FSDPModule).items() if callable(value) and not n.startswith("__"))


def _as_unit(unit: "weakref.ref[nn.Module]", name: str) -> Callable[..., Any]:
    """Return a method of FSDP2's class for a module that has its own class back."""
    inside = name.startswith("set_")  # these go through all units below

    def call(*args: Any, **kwargs: Any) -> Any:
        module: Any = unit()
        if name != MOVE_METHOD and not inside:  # the former calls its base class's
            return getattr(_sharded_class[module], name)(module, *args, **kwargs)
        with sharded_classes(module) if inside else _one_class(module):
            return getattr(type(module), name)(module, *args, **kwargs)

    return call


@contextmanager
def _one_class(module: Any) -> Iterator[None]:
    """Show one module as `fully_shard` left it."""
    own = type(module)
    module.__class__ = _sharded_class.get(module, own)
    try:
        yield
    finally:
        module.__class__ = own
