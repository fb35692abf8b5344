"""Full parameters of a sharded model for a while: to look at them, to change them. Every rank calls these."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import UsageError
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers, full_tensor, is_unit, local_tensor, refuse_of_xla
from fsdplaunch.runtime.sharding.mesh import groups_from_first
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.state_dict.gather import split_like
from fsdplaunch.runtime.torch_internals.fsdp import mend_flat_parameters
from fsdplaunch.runtime.torch_internals.modules import own_parameters, put_tensor


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Hold a model's full parameters, in the dtype they are kept in; nothing can be computed with it inside.

    Args:
        module: Sharded by either version, or with sharded modules inside.
        recurse: Also those of the units inside the outermost.
        writeback: Keep what was changed: every rank keeps its own shard of its own full parameters, so all ranks
            must make the same change.
        rank0_only: Only the first rank holds them; the others keep their shards.
        offload_to_cpu: Hold them in host memory.
        with_grads: Gradients, too.

    Raises:
        UsageError: Changes of one rank only were to be kept.
    """
    refuse_of_xla(module, "summon_full_params")
    if rank0_only and writeback:
        msg = "summon_full_params cannot write back what only the first rank holds"
        raise UsageError(msg, hint="set writeback=False or rank0_only=False")
    options = {"recurse": recurse, "writeback": writeback, "rank0_only": rank0_only, "with_grads": with_grads}
    summoned = _summoned_fsdp1 if fsdp1_wrappers(module) else _summoned_fsdp2
    with summoned(module, **options, offload_to_cpu=offload_to_cpu):
        yield


@contextmanager
def _summoned_fsdp1(module: nn.Module, *, with_grads: bool, **options: bool) -> Iterator[None]:
    """Summon as torch does for FSDP1; with gradients it changes views in place, which autograd must not see."""
    mend_flat_parameters()
    with warnings.catch_warnings(), torch.no_grad() if with_grads else nullcontext():
        warnings.simplefilter("ignore", UserWarning)  # that offloading without rank0_only needs memory
        with FullyShardedDataParallel.summon_full_params(module, with_grads=with_grads, **options):
            yield


@contextmanager
def _summoned_fsdp2(
    module: nn.Module, *, recurse: bool, writeback: bool, rank0_only: bool, with_grads: bool, offload_to_cpu: bool
) -> Iterator[None]:
    """Exchange the DTensors for full tensors; gathered for computing they would be in the computing dtype."""
    places = list(_sharded_places(module, recurse))
    full: dict[nn.Parameter, nn.Parameter] = {}
    with torch.no_grad():
        for shard in dict.fromkeys(shard for *_, shard in places):
            full[shard] = nn.Parameter(_gathered(shard, offload_to_cpu), requires_grad=shard.requires_grad)
            if with_grads and shard.grad is not None:
                full[shard].grad = _gathered(shard.grad, offload_to_cpu)
    try:
        if not rank0_only or dist.get_rank() == 0:
            for holder, attribute, shard in places:
                put_tensor(holder, attribute, full[shard])
        yield
        with torch.no_grad():
            for shard, changed in full.items() if writeback else ():
                _write_back(changed, shard)
                if with_grads and shard.grad is not None and changed.grad is not None:
                    _write_back(changed.grad, shard.grad)
    finally:
        for place in places:
            put_tensor(*place)


def _sharded_places(root: nn.Module, recurse: bool) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    waiting, seen = [(root, 0)], {root}
    while waiting:
        module, depth = waiting.pop()
        depth += is_unit(module)
        if depth > 1 and not recurse:
            continue
        shards = ((name, param) for name, param in own_parameters(module) if isinstance(param, DTensor))
        yield from ((module, name, param) for name, param in shards)
        for child in module.children():
            if child not in seen:
                seen.add(child)
                waiting.append((child, depth))


def _gathered(tensor: torch.Tensor, offload: bool) -> torch.Tensor:
    """Return a copy that changes to do not reach the shards through, also where one rank holds everything."""
    if isinstance(tensor, DTensor):
        full: torch.Tensor = full_tensor(tensor).detach()
        full = full.clone() if full.data_ptr() == tensor.to_local().data_ptr() else full
    else:
        full = tensor.detach().clone()
    return full.cpu() if offload else full


def _write_back(full: torch.Tensor, sharded: torch.Tensor) -> None:
    if isinstance(sharded, DTensor):
        sharded.to_local().copy_(split_like(full.detach(), sharded).to_local())


def apply(module: nn.Module, fn: Callable[[nn.Module], object]) -> nn.Module:
    """Call a function on every module, children first, while parameters are full; the first rank's changes stay.

    Args:
        module: Sharded by either version.
        fn: Typically gives parameters values.

    Returns:
        The module.
    """
    prepared = registered(module)
    ranks = RankGroup() if prepared is None else RankGroup(groups_from_first(prepared.mesh))
    with summon_full_params(module), torch.no_grad():
        for each in _children_first(module, set()):
            fn(each)
        for param in module.parameters():
            ranks.send(local_tensor(param))
    return module


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if child not in seen:
            seen.add(child)
            yield from _children_first(child, seen)
    yield module
