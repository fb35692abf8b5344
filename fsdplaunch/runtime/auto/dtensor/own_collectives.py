"""What a script exchanges of shards by collectives of its own: what all ranks have is there, the rest is refused.

A shard stands for the full tensor, which is the same on all ranks: to broadcast it, or to gather it of all,
exchanges nothing. That ranks have done the same with it is checked by how often it was changed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.auto.state.rank0.copies import copied_from
from fsdplaunch.runtime.auto.state.rank0.shard_names import changes
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor

COLLECTIVES = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "gather_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "scatter_", "alltoall_"),
)
"""The operators by which torch.distributed exchanges tensors."""
FUNCTIONAL = (
    *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "broadcast", "broadcast_"),
    *("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_to_all_single"),
    *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
)
"""Those that return what they have exchanged."""


def refusing(ownership: Ownership) -> Any:
    """Return what refuses the script's own collectives: ranks' gradients are averaged already."""

    def refuse(_op: Any, _args: Any, _kwargs: Any) -> Any:
        raise _refusal(_INSTEAD_OF_REPLICAS if ownership.ranked else _WITHOUT_REPLICAS)

    return refuse


def _refusal(ways: str) -> ShardingError:
    msg = f"{script_line()} exchanges parameters or gradients of a sharded model: they are averaged already"
    return ShardingError(msg, hint=f"{ways}, or with --shard off, which leaves all to the script")


_WITHOUT_REPLICAS = (
    "give the model to DistributedDataParallel; or launch with --hide-ranks, if the script then trains in"
    " one process"
)
_INSTEAD_OF_REPLICAS = (
    "leave the exchange out: what is given to DistributedDataParallel has the same parameters and gradients on all"
    " ranks; or launch with --hide-ranks, if the script then trains in one process"
)


def _broadcast(op: Any, args: Any, kwargs: Any) -> Any:
    """Leave shards as they are, which every rank has of the same tensors.

    Raises:
        ShardingError: This rank has changed them more often, or less, than the rank that sends.
    """
    tensors, *rest = args
    mine = _counts(tensors)
    sent = mine.clone()
    _, work = op([sent], *rest, **kwargs)
    work.wait()
    _check(torch.equal(sent, mine))
    return tensors, work


def _gather(op: Any, args: Any, kwargs: Any) -> Any:
    """Give every rank's place what this rank has, which is the same.

    Raises:
        ShardingError: Ranks have changed it unequally often.
    """
    outputs, tensors, *rest = args
    if any(not isinstance(tensor, DTensor) for tensor in tensors):  # into shards: nothing that a script means
        raise _refusal(_INSTEAD_OF_REPLICAS)
    mine = _counts(tensors)
    found = [[torch.empty_like(mine) for _ in places] for places in outputs[:1]]
    _, work = op(found, [mine], *rest, **kwargs)
    work.wait()
    _check(all(torch.equal(each, mine) for each in found[0]))
    for places, tensor in zip(outputs, tensors, strict=True):
        for place in places:
            place.copy_(tensor)
    return outputs, work


ALIKE = {"broadcast_": _broadcast, "allgather_": _gather}
"""Those that exchange nothing where ranks have done the same."""


def _counts(tensors: Sequence[DTensor]) -> torch.Tensor:
    """Return how often each was changed, and what it was copied from."""
    device = local_tensor(tensors[0]).device
    return torch.tensor([_count(tensor) for tensor in tensors], device=device)


def _count(tensor: DTensor) -> int:
    copy = copied_from(tensor)
    return changes(tensor) + (0 if copy is None else copy.changes)


def _check(same: bool) -> None:
    if same:
        return
    msg = (
        f"{script_line()} sends what only some ranks have changed in a sharded model: each has its own part of it"
    )
    raise ShardingError(
        msg, hint="change it on all ranks, such as by load_state_dict of the same file, and leave the exchange out"
    )
