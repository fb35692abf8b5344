"""The sharded modules of a model: how they are recognized, what this rank holds of them, what stands around them.

`fully_shard` changes the class of each unit, so that `type(module) is nn.Linear` no longer holds, while torch's
methods for units work on that class only: units can be given the class back that the script gave them.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection import parameters_of
from fsdplaunch.runtime.patch import original_of
from fsdplaunch.runtime.torch_internals.distributed import all_gather
from fsdplaunch.runtime.torch_internals.modules import MOVE_METHOD, WRAPPER_ATTRIBUTES, own_children, put_child

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
    """Give every unit of FSDP2 its own class back; torch's methods for units stay, as the instance's."""
    methods = [name for name, value in vars(FSDPModule).items() if callable(value) and not name.startswith("__")]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _sharded_class[module] = type(module)
            for name in methods:
                module.__dict__[name] = _as_unit(weakref.ref(module), name)
            module.__class__ = original_class(module)


def _as_unit(unit: "weakref.ref[nn.Module]", name: str) -> Callable[..., Any]:
    """Return a method of FSDP2's class for a module that has its own class back."""
    inside = name.startswith("set_")  # these go through all units below

    def call(*args: Any, **kwargs: Any) -> Any:
        module: Any = unit()
        if name != MOVE_METHOD and not inside:  # the former calls its base class's
            return getattr(_sharded_class[module], name)(module, *args, **kwargs)
        shown = [
            (each, type(each)) for each in (module.modules() if inside else (module,)) if each in _sharded_class
        ]
        for each, _ in shown:  # as `fully_shard` left them, for torch's own checks of the class
            each.__class__ = _sharded_class[each]
        try:
            return getattr(type(module), name)(module, *args, **kwargs)
        finally:
            for each, own in shown:
                each.__class__ = own

    return call


def reshard(model: nn.Module) -> None:
    """Free what is gathered of a model: its parameters are the shards again."""
    for module in model.modules():
        if is_unit(module):
            unit: Any = module
            unit.reshard()


def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
    """Return the sharded modules of a model, of either FSDP version, outermost first.

    Args:
        module: Sharded, or with sharded modules inside.
        root_only: Leave out those that are inside another.
    """
    if root_only:
        return list(outermost(module))
    return [each for each in module.modules() if is_sharded(each)]


def outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost sharded modules: the model itself, or those inside what was put around it."""
    if is_sharded(model):
        yield model
        return
    for child in model.children():
        yield from outermost(child)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: a DTensor's shard, any other tensor itself; without its history."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def full_tensor(tensor: Any) -> Any:
    """Return a DTensor's full tensor, anything else itself; collective for the former.

    By one exchange of rows where that is all there is to do. Otherwise by torch's own method, which takes three
    times as long: what stands there for the script's calls asks whether rank 0 is alone.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, ranks = tensor.device_mesh, tensor.device_mesh.size()
    in_rows = mesh.ndim == 1 and type(tensor.placements[0]) is Shard and tensor.placements[0].dim == 0
    if not in_rows or ranks == 1 or (tensor.requires_grad and torch.is_grad_enabled()):
        return original_of(DTensor.full_tensor)(tensor)
    own, most = tensor.to_local().detach(), -(-len(tensor) // ranks)  # the last ranks may have fewer rows, or none
    every = own.new_empty((most * ranks, *tensor.shape[1:]))
    if len(own) < most:
        own = torch.cat((own, own.new_zeros((most - len(own), *tensor.shape[1:]))))
    all_gather(as_bytes(every), as_bytes(own), mesh.get_group())
    return every[: len(tensor)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as bytes, whatever its dtype is: a copy where it is not contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def params_with_grad(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have a gradient now."""
    return [param for param in parameters_of(module) if param.grad is not None]


class ModulePlaces:
    """Where each module of a model is held, looked up once: a model of many units is walked once, not per unit."""

    def __init__(self, root: nn.Module) -> None:
        self._held: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for parent in root.modules():
            for name, child in own_children(parent):
                self._held.setdefault(child, []).append((parent, name))

    def exchange(self, old: nn.Module, new: nn.Module) -> None:
        """Put `new` wherever `old` was held; `old` itself may be inside of it."""
        for parent, name in self._held[old]:
            put_child(parent, name, new)


def replace_modules(root: nn.Module, new_for: dict[nn.Module, nn.Module]) -> None:
    """Exchange modules below `root` for others; one that is held in several places is exchanged in all."""
    places = ModulePlaces(root)
    for old, new in new_for.items():
        places.exchange(old, new)


@contextmanager
def without_wrappers(root: nn.Module) -> Iterator[None]:
    """Show a model's modules at the places where the user put them, for as long as nothing is computed with it.

    Libraries compare names in a state with places of modules, and find none inside a wrapper: FSDP1's, that of
    activation checkpointing, torch.compile's.
    """
    wrapped = [
        (parent, name, child, inner)
        for parent in root.modules()
        for name, child in own_children(parent)
        if (inner := _innermost(child)) is not child
    ]
    try:
        for parent, name, _, inner in wrapped:
            put_child(parent, name, inner)
        yield
    finally:
        for parent, name, child, _ in wrapped:
            put_child(parent, name, child)


def _innermost(module: nn.Module) -> nn.Module:
    inner = next((child for name, child in own_children(module) if name in WRAPPER_ATTRIBUTES), None)
    return module if inner is None else _innermost(inner)


_HOMES = ("torch_xla.distributed.fsdp.", "torch_xla.experimental.spmd_fully_sharded_data_parallel")


def refuse_of_xla(model: nn.Module, what: str) -> None:
    """Refuse to do with a model that PyTorch/XLA shards what would take its shards for parameters."""
    for module in model.modules():
        if any(str(base.__module__).startswith(_HOMES) for base in type(module).__mro__):
            msg = f"{what} does not know models that PyTorch/XLA shards, such as this {type(model).__name__}"
            raise ShardingError(msg, hint="save_checkpoint and load_checkpoint do, and merge-weights")
