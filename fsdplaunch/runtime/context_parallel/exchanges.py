"""What ranks that split sequences exchange, each with the gradient that belongs to it."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.script_line import script_line


def check_length(length: int, ranks: int) -> None:
    """Check that ranks can split sequences of a length.

    One position a rank is not enough: models of transformers take a query of one for a step of generation, and
    leave out that attention is causal.

    Raises:
        ShardingError: They cannot.
    """
    if length % ranks:
        msg = f"{script_line()}: sequences of {length} cannot be divided by {ranks} ranks (cp_size)"
        raise ShardingError(msg, hint=f"use lengths that {ranks} divides: pad, or cut the data otherwise")
    if length == ranks:
        msg = f"{script_line()}: sequences of {length} leave one position to each of {ranks} ranks (cp_size)"
        raise ShardingError(msg, hint="use longer ones: pad, or cut the data otherwise")


def own_piece(tensor: torch.Tensor, axis: DeviceMesh, dim: int) -> torch.Tensor:
    """Return this rank's piece, along a dimension, of what all ranks have equally."""
    return tensor.chunk(axis.size(), dim)[axis.get_local_rank()]


def joined(tensor: torch.Tensor, axis: DeviceMesh, dim: int) -> torch.Tensor:
    """Return the ranks' pieces along a dimension as one tensor, of which all ranks compute the same afterwards.

    Each rank's gradient is that of its piece, times the number of ranks: FSDP averages over them, while their
    gradients are summands.
    """
    return _Joined.apply(tensor, axis, dim)  # type: ignore[no-any-return,no-untyped-call]


def exchanged(tensor: torch.Tensor, axis: DeviceMesh, *, split: int, join: int) -> torch.Tensor:
    """Return a tensor that was in pieces along `join`, joined there and in pieces along `split` instead."""
    return _Exchanged.apply(tensor, axis, split, join)  # type: ignore[no-any-return,no-untyped-call]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: DeviceMesh, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _all_gather(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return own_piece(gradient, ctx.axis, ctx.dim) * ctx.axis.size(), None, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: DeviceMesh, split: int, join: int) -> torch.Tensor:
        ctx.axis, ctx.split, ctx.join = axis, split, join
        return _all_to_all(tensor, axis, split, join)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        back = _Exchanged.apply(gradient, ctx.axis, ctx.join, ctx.split)  # type: ignore[no-untyped-call]
        return back, None, None, None  # by apply, so that the gradient has a gradient


def _all_gather(tensor: torch.Tensor, axis: DeviceMesh, dim: int) -> torch.Tensor:
    pieces = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(axis.size())]
    dist.all_gather(pieces, tensor.contiguous(), group=axis.get_group())
    return torch.cat(pieces, dim)


def _all_to_all(tensor: torch.Tensor, axis: DeviceMesh, split: int, join: int) -> torch.Tensor:
    return torch.cat(_received(tensor, axis, split).unbind(), join)


def _received(tensor: torch.Tensor, axis: DeviceMesh, split: int) -> torch.Tensor:
    """Return what each rank has of this one's piece along a dimension, stacked."""
    mine = torch.stack(tensor.chunk(axis.size(), split))
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=axis.get_group())
    return theirs
