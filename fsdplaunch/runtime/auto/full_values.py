"""Full tensors of shards outside of passes, and views of them that write into the shard, `w[0].mul_(2)`.

They are gathered by all ranks together, or fetched by rank 0 alone. A gradient that a full tensor gets is that of
this rank's loss: the gradients of all ranks are averaged, as a pass does.
"""

import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto import HookContext
from fsdplaunch.runtime.auto.rank0.position import in_optimizer_step
from fsdplaunch.runtime.auto.rank0.service import service
from fsdplaunch.runtime.inspection.units import full_tensor, is_over_all_ranks, is_unit, reshard
from fsdplaunch.runtime.messages import calling_lines, calling_stack, script_line
from fsdplaunch.runtime.state_dict.deepcopy import as_before
from fsdplaunch.runtime.state_dict.gather import ShardGatherer, split_like
from fsdplaunch.runtime.torch_internals.distributed import local_tensor, placements_of
from fsdplaunch.runtime.torch_internals.fsdp import root_mixed_precision
from fsdplaunch.runtime.torch_internals.tensors import (
    change_count,
    is_in_transform,
    note_changes,
    storage_identity,
    tree_map,
)

_together: set[tuple[str | int, ...]] = set()
"""The calls that all ranks were seen to make together, with those that led to them: asked once."""
_alone_at: list[Any] = []
"""The call that rank 0 was seen to make alone, and how far it was: what it reads next is read for that call."""


def full_value(tensor: DTensor, *, call: str) -> torch.Tensor:
    """Return the full tensor of a shard, without gradients, by all ranks or by rank 0 alone. Collective."""
    alone = fetcher_for_rank0_alone(call, [tensor])
    return gathered(tensor.detach()) if alone is None else fetch(alone, tensor)


def gathered(tensor: Any) -> torch.Tensor:
    """Return the full tensor of a shard, whose gradient is averaged over the ranks' losses. Collective."""
    is_full = all(placement.is_replicate() for placement in placements_of(tensor))
    full: torch.Tensor = tensor.to_local() if is_full else full_tensor(tensor)
    if full.untyped_storage().nbytes() != full.nbytes:  # a slice of uneven shards with their padding
        full = full.contiguous() if full.requires_grad else full.clone()
    elif full.untyped_storage().data_ptr() == local_tensor(tensor).untyped_storage().data_ptr():
        full = full.clone()
    if full.requires_grad:
        mesh = tensor.device_mesh

        def mean(gradient: torch.Tensor) -> torch.Tensor:
            summed: Any = DTensor.from_local(gradient, mesh, [Partial()] * mesh.ndim, run_check=False)
            return torch.div(summed.redistribute(placements=[Replicate()] * mesh.ndim).to_local(), mesh.size())

        full.register_hook(mean)
    return full


def placed_like(shard: Any, value: Any) -> Any:
    """Return a tensor of a shard's shape placed as that is, without gradients; cut where it is plain."""
    if isinstance(value, DTensor):
        if placements_of(value) == placements_of(shard) or value.shape != shard.shape:
            return value
        detached: Any = value.detach()
        return detached.redistribute(shard.device_mesh, shard.placements)
    return split_like(value, shard) if value.shape == shard.shape else value


def fetcher_for_rank0_alone(call: str, tensors: list[Any]) -> ShardGatherer | None:
    """Return what fetches shards where rank 0 alone has come to this call. Collective at its first time."""
    found = service()
    if found is None or in_optimizer_step():
        return None
    calls = calling_stack()
    by_torch = threading.current_thread().name.startswith("Dummy-")  # as those of backward passes on a GPU
    if calls in _together or by_torch or not all(map(is_over_all_ranks, tensors)):
        return None
    gathering = ShardGatherer(call, keep=True, at=calling_lines())
    at = calls, found.position.place(), found.position.met
    if at in _alone_at:
        gathering.together = False
        return gathering
    gathering.meet()
    _alone_at[:] = [] if gathering.together else [at]
    if not gathering.together:
        return gathering
    _together.add(calls)
    return None


def read_full_tensor(original: Any, _: HookContext, tensor: DTensor, **kwargs: Any) -> Any:
    """Stand for `DTensor.full_tensor`, which rank 0 may call alone; the other ranks go on at once."""
    found, calls = service(), calling_stack()
    if found is not None and calls not in _together and is_over_all_ranks(tensor):
        call = f"full_tensor() at {script_line()}"
        if found.asks_alone(call):
            return found.full(tensor, call).to(tensor.device)
        _together.add(calls)
    return original(tensor, **kwargs)


def fetch(gathering: ShardGatherer, tensor: Any) -> torch.Tensor:
    """Return on rank 0 alone the full tensor, on the shard's device, that other ranks' shards are fetched for."""
    full = gathering.gather(tensor).to(tensor.device)
    return full.requires_grad_(tensor.requires_grad)


class Gathered:
    """The full tensor of a shard that some views are of: plain, with gradients where the views have some."""

    def __init__(self, shard: DTensor, full: torch.Tensor) -> None:
        self.shard, self.full = shard, full
        self.storage = storage_identity(full)
        self.changes = shard_changes(shard)

    def refresh(self) -> None:
        """Take the values that the shard has by now. Collective where it has changed."""
        if shard_changes(self.shard) != self.changes:
            full = full_value(self.shard, call="a view of a shard")
            self.full.data.copy_(full)  # torch would refuse to differentiate views of what counts its changes
            self.changes = shard_changes(self.shard)

    def write_back(self) -> None:
        """Give the shard its part of what was written into the full tensor, which every rank has."""
        with torch.no_grad():
            part: Any = split_like(self.full, self.shard)
            local_tensor(self.shard).copy_(local_tensor(part))
        note_changes([self.shard])
        self.changes = shard_changes(self.shard)


class FullView(torch.Tensor):
    """A view of a full tensor that was gathered; what is computed of it is plain."""

    gathered: Gathered

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return DTensor.__torch_function__(func, types, args, kwargs)


def view_of(gathered: Gathered, view: torch.Tensor) -> FullView:
    """Return a view that knows what it is of."""
    known = view.as_subclass(FullView)
    known.gathered = gathered
    return known


def plain(value: Any) -> Any:
    """Return a view's tensor without what it knows; any other value itself."""
    return value.as_subclass(torch.Tensor) if isinstance(value, FullView) else value


def as_views(result: Any, sources: list[Gathered]) -> Any:
    """Return what a function has given with views of full tensors known as such."""
    storages = {source.storage: source for source in sources}

    def known(value: Any) -> Any:
        if type(value) is not torch.Tensor or value.is_meta or value.layout != torch.strided:
            return value
        source = storages.get(storage_identity(value))
        return value if source is None else view_of(source, value)

    return tree_map(known, result)


def shard_changes(shard: Any) -> tuple[int, ...]:
    """Return what is another when a shard has other values, or other memory."""
    local = local_tensor(shard)
    return change_count(shard) + change_count(local), storage_identity(local)


def functional_call(
    original: Any, hook_context: HookContext, module: nn.Module, given: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stand for `torch.func.functional_call`: a sharded model computes with the tensors that it is given.

    FSDP2 would put the gathered parameters in the place of whatever stands there, without a word.
    """
    if hook_context.ownership.ours:
        merged = given if isinstance(given, Mapping) else {k: v for one in given for k, v in one.items()}
        reshard(module)
        own = dict(module.named_parameters(remove_duplicate=False))
        shards = any(isinstance(param, DTensor) for param in own.values())
        if shards and any(value is not own[name] for name, value in merged.items() if name in own):
            if is_in_transform():
                msg = f"{calling_lines()}: torch.func for the parameters of a sharded model would lose gradients"
                raise ShardingError(msg, hint="run this script in one process: --num-processes 1 --shard off")
            return call_unsharded(original, module, {**own, **merged}, own, *args, **kwargs)
    return original(module, given, *args, **kwargs)


def call_unsharded(
    call: Any, module: nn.Module, tensors: Mapping[str, Any], names: Iterable[str], *args: Any, **kwargs: Any
) -> Any:
    """Call a module by `functional_call`, without the hooks of sharding. Collective.

    Of the tensors that it is to have, those of these names are its parameters: full ones, with gradients of any
    order, in the dtype of the mixed precision, as is what it is given.
    """
    units = (part for part in module.modules() if is_unit(part))
    dtype = next((root_mixed_precision(unit).param_dtype for unit in units), None)

    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if dtype is not None and floating else value

    once = {id(tensors[name]): tensors[name] for name in names}
    full = {key: cast(gathered(each) if isinstance(each, DTensor) else each) for key, each in once.items()}
    args, kwargs = tree_map(cast, (args, kwargs))
    with ExitStack() as stack:
        for part in list(module.modules()):
            stack.enter_context(as_before(part))
        return call(module, {**tensors, **{name: full[id(tensors[name])] for name in names}}, *args, **kwargs)
