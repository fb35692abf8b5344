"""Put one full tensor together on rank 0, of its own shard and those that other ranks send."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.auto.state.rank0.connection import Connection
from fsdplaunch.runtime.auto.state.rank0.flat_shards import FlatShard
from fsdplaunch.runtime.auto.state.rank0.shard_names import (
    counted_changes,
    empty_full,
    extent,
    on_host,
    readable,
)
from fsdplaunch.runtime.torch_internals.process_groups import default_timeout

_KNOWN = (
    "save the model's state_dict() and the optimizer's, or have every rank make this call; "
    "with --hide-ranks a library that saves by rank 0 alone does so"
)


_READING = "() of a shard at "
COMPUTING = "computing with a shard"
_COMPUTED = "compute it on all ranks, before `if rank == 0:`, and let rank 0 print or save it"


class OtherShardError(Exception):
    """A rank has no such shard, or one of another moment.

    Attributes:
        rank: That rank.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


def fetch(name: str, shard: DTensor | FlatShard, connections: Iterable[Connection], steps: int) -> torch.Tensor:
    """Return a full tensor in host memory.

    Args:
        name: By which ranks know it.
        shard: Rank 0's.
        connections: To the other ranks that have a shard of it.
        steps: Optimizer steps that rank 0 has made, and each of them must have.

    Raises:
        OtherShardError: The shards are not of one moment.
        CheckpointError: A rank has ended.
    """
    known = counted_changes(name, shard)
    asked = list(connections)
    for connection in asked:
        connection.send({"kind": "shard", "name": name, "changes": known, "steps": steps})
    full = empty_full(shard)
    _part(full, *extent(shard)).copy_(on_host(shard, None))
    counts, failure = {known} - {None}, None
    for connection in asked:  # all of them, so that none sends into the next tensor
        changed = _receive(connection, full)
        counts |= {changed}
        if (changed is None or len(counts) > 1) and failure is None:
            failure = OtherShardError(connection.rank)
    if failure is not None:
        raise failure
    return shard.shaped(full) if isinstance(shard, FlatShard) else full


def _receive(connection: Connection, full: torch.Tensor) -> int | None:
    """Put a rank's shard in its place, and return how often it was changed; None where it has none to send."""
    answer = connection.receive(default_timeout())
    if answer["shape"] is None:
        return None
    part = _part(full, answer["shape"], answer["offset"])
    if part.is_contiguous():
        connection.receive_into(part)
    else:
        buffer = torch.empty(part.shape, dtype=part.dtype)
        connection.receive_into(buffer)
        part.copy_(buffer)
    changes: int = answer["changes"]
    return changes


def _part(full: torch.Tensor, shape: Any, offset: Any) -> torch.Tensor:
    """Return the part of a full tensor that is one rank's shard."""
    for axis, (length, start) in enumerate(zip(shape, offset, strict=True)):
        full = full.narrow(axis, start if length else 0, length)
    return full


def unknown_tensor(shape: torch.Size, call: str) -> CheckpointError:
    """Return the error of a tensor of which the other ranks have no shard by name."""
    known = "is neither a parameter nor optimizer state as they are now, nor a copy that every rank made"
    what = f"a tensor of shape {tuple(shape)} in it {known}"
    msg = f"{call} was called on rank 0 only, and {what}: other ranks cannot tell their shard"
    return CheckpointError(msg, hint=_COMPUTED if call.startswith(COMPUTING) or _READING in call else _KNOWN)


def other_gradient(name: str, call: str) -> CheckpointError:
    """Return the error of a gradient: other ranks drop theirs before they come to where they wait for rank 0."""
    msg = f"{call} was called on rank 0 only, and needs the gradient of {name}, which other ranks need not keep"
    hint = "; torch.nn.utils.clip_grad_norm_, called by all ranks, returns the norm of all gradients"
    return CheckpointError(msg, hint=_COMPUTED + hint)


def before_backward(call: str) -> CheckpointError:
    """Return the error of a save while some parameters are gathered for a backward."""
    msg = f"{call} was called on rank 0 only, between a pass of a model and its backward"
    return CheckpointError(msg, hint="save after loss.backward(), or on all ranks")


def changed_shard(name: str, call: str, rank: int, where: str) -> CheckpointError:
    """Return the error of a tensor of which another rank has the shard of another moment.

    Args:
        name: By which ranks know it.
        call: The script's.
        rank: The other.
        where: The line at which that is.
    """
    what = f"{readable(name)} was changed on rank {rank} since, which is at {where}"
    msg = f"{call} was called on rank 0 only, and {what}"
    return CheckpointError(msg, hint="change weights for a save and back on rank 0 only, or save on all ranks")
