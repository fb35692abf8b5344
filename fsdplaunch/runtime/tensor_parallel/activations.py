"""Activations at the borders of a split layer: what each rank has of them, and the exchange that changes it.

Each function has the gradient that belongs to it. They are made of DTensor's public conversions, so that
torch.compile sees through them.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fsdplaunch.errors import ShardingError


def copied(tensor: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return what all ranks have equally, for each to compute a part from: its gradients are added up."""
    return _placed(tensor, axis, Replicate()).to_local(grad_placements=[Partial()])


def summed(tensor: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return the sum of what the ranks have, on each of them."""
    return _moved(tensor, axis, Partial(), Replicate())


def gathered(tensor: torch.Tensor, axis: DeviceMesh, dim: int = -1) -> torch.Tensor:
    """Return the ranks' pieces along a dimension, joined, on each of them."""
    return _moved(tensor, axis, Shard(dim % tensor.dim()), Replicate())


def piece(tensor: torch.Tensor, axis: DeviceMesh, dim: int = -1) -> torch.Tensor:
    """Return this rank's piece, along a dimension, of what all ranks have equally.

    Raises:
        ShardingError: The ranks do not divide it.
    """
    if tensor.size(dim) % axis.size():
        msg = (
            f"activations of {tuple(tensor.shape)} cannot be divided along dimension {dim} by {axis.size()} ranks"
        )
        raise ShardingError(
            msg, hint="use lengths that tp_size divides, or leave sequence_parallel out of the plan"
        )
    return _moved(tensor, axis, Replicate(), Shard(dim % tensor.dim()))


def _placed(tensor: torch.Tensor, axis: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(tensor, axis, [placement], run_check=False)


def _moved(tensor: torch.Tensor, axis: DeviceMesh, before: Placement, after: Placement) -> torch.Tensor:
    return _Itself.apply(_placed(tensor, axis, before).redistribute(placements=[after]).to_local())  # type: ignore[no-any-return,no-untyped-call]


class _Itself(torch.autograd.Function):
    """A tensor that is no view of another one: changing a view in place would lose FSDP2's hooks on it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient
