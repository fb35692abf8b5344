"""Handlers of torch functions that are given shards: each computes what one process would with full tensors.

Each gets torch's function and its arguments. Those that gather are collective: every rank runs the script's line.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from fsdplaunch.runtime.auto.model.written_in_passes import is_gathered, put_data
from fsdplaunch.runtime.auto.rng.rng_streams import RngStreams
from fsdplaunch.runtime.auto.state.rank0.shard_names import counting_one_change
from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.state_dict.optim_state_dict import cut_to_shard
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import param_groups, put_shard
from fsdplaunch.runtime.torch_internals.tensors import tree_map

Handler = Callable[[Any, Any, Any], Any]


def gather(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute with full tensors: torch's `item` gives this rank's number, formatting and `numpy` refuse shards."""
    args, kwargs = tree_map(full_tensor, (args, kwargs))
    return func(*args, **kwargs)


def reduce(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on the shards; a number is a plain tensor at once, so that it can be added to a loss."""
    if _is_extreme_penalty(func, args, kwargs):
        args, kwargs = tree_map(replicated, (args, kwargs))
    return tree_map(lambda value: full_tensor(value) if _is_number(value) else value, func(*args, **kwargs))


def add(func: Any, args: Any, kwargs: Any) -> Any:
    """Gather a number that is added to a plain tensor."""
    if any(isinstance(arg, torch.Tensor) and not isinstance(arg, DTensor) for arg in args):
        args = [full_tensor(arg) if _is_number(arg) else arg for arg in args]
    return func(*args, **kwargs)


def full_data(func: Any, args: Any, _kwargs: Any) -> None:
    """Give a plain parameter the full tensor where it is assigned a shard, which torch takes and crashes with."""
    param, value = args
    if not isinstance(param, DTensor):
        value = full_tensor(value)
    if is_gathered(param) and value.shape == param.shape:
        put_data(param, value)
    else:
        func(param, value)


def draw(streams: RngStreams, func: Any, args: Any, kwargs: Any) -> Any:
    """Draw the full tensor from the stream that all ranks share, and keep this rank's shard.

    torch draws for each shard by itself, which on CPU gives every rank the same numbers.
    """
    shard, *limits = args
    full = torch.empty_strided(  # one with gaps is drawn in another order
        shard.shape, shard.stride(), dtype=shard.dtype, device=shard.to_local().device
    )
    limits, kwargs = tree_map(full_tensor, (limits, kwargs))
    with streams.shared():
        func(full, *limits, **kwargs)
    with torch.no_grad():
        shard.copy_(distribute_tensor(full, shard.device_mesh, shard.placements))
    return shard  # copying has written it into what it is a part of


def draw_like(streams: RngStreams, func: Any, args: Any, kwargs: Any) -> Any:
    """Draw a tensor like a shard, or from a distribution given by shards, as one process would; keep a shard."""
    like = next((arg for arg in args if isinstance(arg, DTensor)), None)
    if like is None:
        return func(*args, **kwargs)
    with torch.no_grad(), streams.shared():
        full = func(*tree_map(full_tensor, args), **kwargs)
    return distribute_tensor(full, like.device_mesh, like.placements)


def make_new(place: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    """Make a plain tensor where a script takes dtype and device from a parameter; a shard where also its shape.

    Hidden states are made so, and so are the moments of optimizers, which meet gradients that are shards.

    Args:
        place: Makes the shard, by `make_shard`; collective.
        func: The method.
        args: What it was called with, the parameter first.
        kwargs: What it was called with by name.
    """
    shard, *rest = args
    made = func(shard.to_local().detach(), *rest, **kwargs)
    if made.shape != shard.shape or not made.dim():
        return made
    return place(func, args, kwargs)


def make_shard(func: Any, args: Any, kwargs: Any) -> Any:
    """Make a shard as one process makes a tensor like another. Collective."""
    shard, *rest = args
    made = func(shard.to_local().detach(), *rest, **kwargs)
    sharded = distribute_tensor(made, shard.device_mesh, shard.placements)
    return sharded.requires_grad_(made.requires_grad)


def assign_data(models: Iterable[nn.Module], func: Any, args: Any, _kwargs: Any) -> None:
    """Exchange the shard of a parameter, in torch's sharding as well, which `.data = value` leaves as it was."""
    param, value = args
    holder = _holder_of(param, models) if param.shape == value.shape else None
    if holder is None:
        func(param, value)
        return
    shard = placed_like(param, value) if isinstance(value, DTensor) else cut_to_shard(value, param)
    local = shard.to_local().to(param.to_local().device, param.dtype).detach().contiguous()
    shared = isinstance(value, DTensor) and local.data_ptr() == value.to_local().data_ptr()
    with counting_one_change(param):
        put_shard(holder, param, local, value if shared else None)


def replicate(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a loss operator on full tensors: torch scales its gradient by the size of the shard, or has no way.

    The result is replicated again, since autograd is above operators and expects a sharded tensor's kind.
    """
    mesh = next(value.device_mesh for value in (*args, *kwargs.values()) if isinstance(value, DTensor))
    placements = [Replicate()] * mesh.ndim

    def placed(value: Any) -> Any:
        is_made = isinstance(value, torch.Tensor)  # a backward gives None for what needs no gradient
        return DTensor.from_local(value, mesh, placements, run_check=False) if is_made else value

    return tree_map(placed, gather(func, args, kwargs))


def replicate_empty(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that fails on empty shards, and reduce partial results, which torch takes for finished."""
    if _has_empty_shards(args[0]):
        return replicate(func, args, kwargs)
    return finish(func(*args, **kwargs))


def replicate_unequal(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a mean, for which torch 2.7 to 2.9 average the means of shards of unequal sizes."""
    return replicate(func, args, kwargs) if _has_unequal_shards(args[0]) else func(*args, **kwargs)


def add_up(func: Any, args: Any, kwargs: Any) -> Any:
    """Add up over the ranks what an operator leaves to be added up, which nothing plain can be written into."""
    return finish(func(*args, **kwargs))


def fill(func: Any, args: Any, _kwargs: Any) -> Any:
    """Fill shards by a mask in place, as the gradient of a norm does; torch 2.7 to 2.10 cannot."""
    shards, mask, value = args
    full, mesh = full_tensor(mask).expand(shards.shape), shards.device_mesh
    own = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    func(shards.to_local(), own.redistribute(placements=shards.placements).to_local(), value)
    return shards


def fill_with(_func: Any, args: Any, _kwargs: Any) -> Any:
    """Fill with a number that is in a tensor, for which torch has no way."""
    shard, number = args
    (local_tensor(shard) if isinstance(shard, DTensor) else shard).fill_(full_tensor(number))
    return shard


def finish(result: Any) -> Any:
    """Reduce the partial results of an operator."""
    return tree_map(lambda value: replicated(value.detach()) if is_partial(value) else value, result)


def _is_extreme_penalty(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the gradient is the largest value's alone: torch gives it to that of every shard."""
    given = [*args, *kwargs.values()]
    infinite = any(isinstance(value, float) and math.isinf(value) for value in given)
    if not infinite and func.__name__ not in ("max", "min", "amax", "amin"):
        return False
    return any(isinstance(value, DTensor) and value.requires_grad for value in given)


def full_tensor(value: Any) -> Any:
    """Return the full tensor, gathered where it is not full: torch 2.7 has no gradient of gathering what is.

    In a backward pass torch 2.7 would detach in place what it gathered of a parameter, and has no way to.
    """
    if not isinstance(value, DTensor):
        return value
    value = value if torch.is_grad_enabled() else value.detach()
    full: Any = value.to_local() if is_replicated(value) else value.full_tensor()
    return averaged(full, value.device_mesh)


def averaged(full: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Let the gradient of a full tensor be the mean of those of all ranks, for each may have another loss.

    Args:
        full: Gathered of a shard, or computed of shards.
        mesh: Over which.
    """
    if full.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():

        def mean(gradient: torch.Tensor) -> torch.Tensor:
            summed: Any = DTensor.from_local(gradient, mesh, [Partial()] * mesh.ndim, run_check=False)
            return torch.div(_replicated(summed).to_local(), mesh.size())

        full.register_hook(mean)
    return full


def replicated(value: Any) -> Any:
    """Return a tensor replicated on every rank: torch 2.7 has no gradient of replicating what is."""
    if not isinstance(value, DTensor) or is_replicated(value):
        return value
    return _replicated(value)


def _replicated(value: Any) -> Any:
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)


def is_replicated(value: DTensor) -> bool:
    """Return whether every rank has all of a tensor."""
    return all(placement.is_replicate() for placement in value.placements)


def placed_like(shard: Any, value: Any) -> Any:
    """Return a tensor like a shard, placed as that is; any other value itself."""
    if not isinstance(value, DTensor) or value.placements == shard.placements or value.shape != shard.shape:
        return value
    return value.redistribute(shard.device_mesh, shard.placements)


def _is_number(value: Any) -> bool:
    return isinstance(value, DTensor) and value.dim() == 0


def is_partial(value: Any) -> bool:
    """Return whether a tensor is still to be added up over the ranks."""
    return isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements)


def _has_empty_shards(tensor: Any) -> bool:
    """Return whether some rank has nothing of a tensor; all but the last shards are of one size, rounded up."""
    return any(-(-rows // ranks) * (ranks - 1) >= rows for rows, ranks in cuts(tensor))


def _has_unequal_shards(tensor: Any) -> bool:
    return any(rows % ranks for rows, ranks in cuts(tensor))


def cuts(tensor: Any) -> Iterator[tuple[int, int]]:
    """Yield the sizes of a tensor's sharded dimensions, each with its number of shards, over all axes of ranks."""
    shards: dict[int, int] = {}
    for axis, placement in enumerate(tensor.placements if isinstance(tensor, DTensor) else ()):
        dim = getattr(placement, "dim", None)  # of Shard, and of its form for what ranks split twice
        if dim is not None:
            shards[dim] = shards.get(dim, 1) * tensor.device_mesh.size(axis)
    for dim, ranks in shards.items():
        yield tensor.size(dim), ranks


def _holder_of(param: Any, models: Iterable[nn.Module]) -> Any:
    """Return what holds a parameter in torch's sharding; None for tensors that are no parameters of the models."""
    if not isinstance(param, nn.Parameter):
        return None
    modules = (module for model in list(models) for module in model.modules() if is_unit(module))
    held = (held for module in modules for group in param_groups(module) for held in group.fsdp_params)
    return next((one for one in held if one.sharded_param is param), None)
