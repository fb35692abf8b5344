"""Compute the operators that torch's DTensor does not know, which differ by its version: `hardtanh_` in 2.7.

Elementwise ones on the shards, all others with full tensors, of which each rank keeps its part.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.auto.dtensor.shard_handlers import Handler, is_partial
from fsdplaunch.runtime.auto.dtensor.shard_parts import full_copy, refresh, take_part, written_back
from fsdplaunch.runtime.auto.dtensor.shard_writes import is_computing
from fsdplaunch.runtime.auto.rng.rng_streams import RngStreams
from fsdplaunch.runtime.auto.state.rank0.copies import in_optimizer_step
from fsdplaunch.runtime.auto.state.rank0.pulling import rank0_saves
from fsdplaunch.runtime.auto.state.rank0.shard_names import is_over_all_ranks
from fsdplaunch.runtime.state_dict.optim_state_dict import cut_to_shard
from fsdplaunch.runtime.torch_internals.dtensor import (
    changes_shape_of_given,
    decomposed,
    gives_view,
    is_elementwise,
    is_random,
    local_tensor,
    operator_handlers,
    placements_of,
    refuse_mixture,
    written_arguments,
)
from fsdplaunch.runtime.torch_internals.tensors import tree_leaves, tree_map


def by_torch(op: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operator as torch does."""
    return op(*args, **kwargs)


_OF_MEMORY = ("is_set_to", "record_stream", "_has_same_storage_numel")
"""What asks for a tensor's memory: the full tensor's would be another."""


class UnknownOperators:
    """What computes operators that torch does not know, and is put into its table when one of them is first met.

    Not before: torch has some thousand of them, which would take a second to list at every start.

    Args:
        ownership: Who shards.
        streams: From where random ones draw.
        put: Puts handlers into DTensor's table.
        begin_parts: Called where one gives a part of a shard.
    """

    def __init__(
        self,
        ownership: Ownership,
        streams: RngStreams,
        put: Callable[[dict[Any, Handler]], None],
        begin_parts: Callable[[], None],
    ) -> None:
        self._ownership, self._streams, self._put, self._begin_parts = ownership, streams, put, begin_parts
        self._computing: set[Any] = set()
        self._begun: set[Any] = set()

    def begin(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Have an operator that torch may compute by others look whether rank 0 alone computes it, from now on."""
        shared = self._ownership.ours and rank0_saves() is not None and not in_optimizer_step()
        if not shared or op in self._begun or not is_computing(op):
            return NotImplemented
        self._begun.add(op)
        self._put({op: by_torch})
        return operator_handlers()[op](op, args, kwargs)

    def meet(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operator that torch has refused; `NotImplemented` where this package does not either."""
        shards = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
        over_all = all(map(is_over_all_ranks, shards))
        if (
            not self._ownership.ours
            or op in self._computing
            or not shards
            or not _is_computed(op, over_all=over_all)
        ):
            return NotImplemented
        self._put({op: self._compute})
        return operator_handlers()[op](op, args, kwargs)

    def _compute(self, op: Any, args: Any, kwargs: Any) -> Any:
        self._computing.add(op)
        try:
            if gives_view(op):
                return take_part(self._begin_parts, op, args, kwargs)
            result = decomposed(op, args, kwargs)
            return self._whole(op, args, kwargs) if result is NotImplemented else result
        finally:
            self._computing.discard(op)

    @torch.no_grad()
    def _whole(self, op: Any, args: Any, kwargs: Any) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        shards = [each for each in tensors if isinstance(each, DTensor)]
        if not shards:
            return op(*args, **kwargs)
        if any(each.dim() and not isinstance(each, DTensor) for each in tensors):
            refuse_mixture(op)  # of the batch perhaps, and then each rank's own
        for each in shards:
            refresh(each)
        if is_elementwise(op) and _are_alike(args, kwargs):
            result = _on_shards(op, args, kwargs)
        elif is_random(op):
            with self._streams.shared():
                result = _on_full(op, args, kwargs, shards[0])
        else:
            result = _on_full(op, args, kwargs, shards[0])
        for each in _written(op, args, kwargs):
            written_back(each)
        return result


def _is_computed(op: Any, *, over_all: bool) -> bool:
    """Return whether we compute it: no other shapes for shards, and no draws for some ranks only."""
    named = str(op).split(".")[1] in _OF_MEMORY
    return not named and not changes_shape_of_given(op) and (over_all or not is_random(op))


def _written(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the shards that an operator writes into, by its schema."""
    return [each for each in tree_leaves(written_arguments(op, args, kwargs)) if isinstance(each, DTensor)]


def _are_alike(args: Any, kwargs: Any) -> bool:
    """Return whether what belongs together of shards is on one rank: tensors of one shape, placed alike.

    Of lists that is what has the same place in each.
    """
    given = [*args, *kwargs.values()]
    rows = [each for each in given if isinstance(each, list | tuple) and _has_shards(each)]
    if not rows:
        return _are_placed_alike([each for each in given if isinstance(each, torch.Tensor)])
    single = any(isinstance(each, torch.Tensor) and each.dim() for each in given)
    if single or len({len(row) for row in rows}) > 1:
        return False
    return all(
        _are_placed_alike([each for each in row if isinstance(each, torch.Tensor)])
        for row in zip(*rows, strict=True)
    )


def _has_shards(values: Any) -> bool:
    return any(isinstance(each, DTensor) for each in values)


def _are_placed_alike(tensors: list[Any]) -> bool:
    return all(
        isinstance(each, DTensor)
        and not is_partial(each)
        and each.shape == tensors[0].shape
        and placements_of(each) == placements_of(tensors[0])
        and each.device_mesh == tensors[0].device_mesh
        for each in tensors
    )


def _on_shards(op: Any, args: Any, kwargs: Any) -> Any:
    """Compute elementwise: each rank its own part."""
    like = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor))
    given = {id(local_tensor(each)): each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)}

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) in given:
            return given.get(id(value), value)
        return DTensor.from_local(
            value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    args, kwargs = tree_map(_local, (args, kwargs))
    return tree_map(placed, op(*args, **kwargs))


def _local(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, DTensor) else value


def _on_full(op: Any, args: Any, kwargs: Any, like: Any) -> Any:
    """Compute with full tensors, and put what is written into them into the shards. Collective."""
    given: dict[int, Any] = {}

    def full(value: Any) -> Any:
        copy = full_copy(value)
        if isinstance(value, torch.Tensor):
            given[id(copy)] = value
            kept.append(copy)  # else its id may become another's
        return copy

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) in given:
            return given.get(id(value), value)
        mesh = like.device_mesh
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)

    kept: list[Any] = []
    full_args, full_kwargs = tree_map(full, (args, kwargs))
    result = op(*full_args, **full_kwargs)
    for copy in tree_leaves(written_arguments(op, full_args, full_kwargs)):
        if isinstance(given.get(id(copy)), DTensor):
            shard = given[id(copy)]
            local_tensor(shard).copy_(local_tensor(cut_to_shard(copy, shard)))
    return tree_map(placed, result)
