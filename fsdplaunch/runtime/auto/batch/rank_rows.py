"""The rows of a batch that each data rank computes, and tensors that cross from all rows to own rows and back.

Every function here is differentiable any number of times. The loss behind what is gathered is the same on all
ranks, and FSDP averages gradients over them: a gradient that enters a rank's rows is multiplied by their number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.runtime.torch_internals.process_groups import all_gather


@dataclass(frozen=True, slots=True)
class RankRows:
    """One rank's rows of a batch.

    Attributes:
        total: Rows of the global batch.
        rank: This rank among those that divide it.
        ranks: How many they are; they divide `total` evenly.
        group: Theirs; None for all ranks.
    """

    total: int
    rank: int
    ranks: int
    group: dist.ProcessGroup | None = None

    @property
    def own(self) -> int:
        """Return how many rows each rank has."""
        return self.total // self.ranks

    def slice_of(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return a view of this rank's part of a dimension that all ranks divide evenly."""
        part = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.rank * part, part)

    def all_slices(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return every rank's part of a dimension put together, without gradients. Collective."""
        if dim:
            return torch.cat(gather_equal(tensor, self.ranks, self.group).unbind(), dim)
        every = tensor.new_empty(tensor.shape[0] * self.ranks, *tensor.shape[1:])
        _gather_into(every, tensor, self.group)
        return every  # no view: a script may change what a model returns

    def cut(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's rows; the gradient of the rows of all ranks is that of the tensor."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return self.slice_of(tensor, dim)
        return _Cut.apply(tensor, self, dim)  # type: ignore[no-any-return, no-untyped-call]

    def gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the rows of all ranks; the gradient of this rank's rows is their part of it. Collective."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return self.all_slices(tensor.detach(), dim)
        return _Gather.apply(tensor, self, dim)  # type: ignore[no-any-return, no-untyped-call]

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that all ranks compute their rows with; its gradient is that of all of them."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        return _Share.apply(tensor, self)  # type: ignore[no-any-return, no-untyped-call]

    def weighted_sum(self, tensor: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
        """Return the sum over ranks of what each has computed of its rows, times its weight. Collective."""
        return _WeightedSum.apply(tensor, self, weights)  # type: ignore[no-any-return, no-untyped-call]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, on which the results of all of them depend. Collective."""
        return _Sum.apply(tensor, self.group)  # type: ignore[no-any-return, no-untyped-call]


@cache
def data_group(rank: int, size: int, readers: int) -> dist.ProcessGroup | None:
    """Return the group of the ranks that read different data, this one among them; None for all. Collective.

    Args:
        rank: This one among all.
        size: How many there are.
        readers: How many read different data; neighbours that split layers or sequences read the same.
    """
    if readers == size:
        return None
    alike = size // readers
    groups = [dist.new_group(list(range(first, size, alike))) for first in range(alike)]
    group: dist.ProcessGroup = groups[rank % alike]
    return group


def gather_equal(tensor: torch.Tensor, ranks: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the tensors of all ranks, of one shape and dtype, as `[ranks, *shape]`. Collective."""
    every = tensor.new_empty(ranks, *tensor.shape)
    _gather_into(every, tensor, group)
    return every


def _gather_into(every: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Write the tensors of all ranks one after the other, as bytes: not every backend sends every dtype."""
    if tensor.numel():
        all_gather(_bytes(every), _bytes(tensor.contiguous()), group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rows: RankRows, dim: int) -> torch.Tensor:
        ctx.rows, ctx.dim = rows, dim
        return rows.slice_of(tensor, dim).clone()  # a view out of a function of ours could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.rows.gather(gradients[0], ctx.dim) / ctx.rows.ranks, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rows: RankRows, dim: int) -> torch.Tensor:
        ctx.rows, ctx.dim = rows, dim
        return rows.all_slices(tensor, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.rows.cut(gradients[0], ctx.dim) * ctx.rows.ranks, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rows: RankRows) -> torch.Tensor:
        ctx.rows = rows
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.rows.sum(gradients[0]) / ctx.rows.ranks, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rows: RankRows, weights: Sequence[float]) -> torch.Tensor:
        ctx.factor = weights[rows.rank] * rows.ranks
        every = gather_equal(tensor.detach(), rows.ranks, rows.group)
        weight = torch.tensor(weights, dtype=torch.float64).view(-1, *[1] * tensor.dim()).to(every.device)
        return (every.double() * weight).sum(0).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        total = tensor.detach().contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Sum.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]
