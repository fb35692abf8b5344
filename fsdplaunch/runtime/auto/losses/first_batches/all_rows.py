"""Put together what each rank computed a loss from, its own rows of it, to what one process would have."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdplaunch.runtime.collectives.rank_group import from_all


class Fact(NamedTuple):
    """What other ranks know of a tensor before it is sent.

    Attributes:
        shape: Its own.
        dtype: Its own, by its name.
        values: Numbers that are equal for equal tensors.
    """

    shape: tuple[int, ...]
    dtype: str
    values: tuple[float, float]


class AllRows(NamedTuple):
    """A tensor of all ranks.

    Attributes:
        tensor: The rows of all ranks, or what all have alike.
        dim: Of the rows; None where all have it alike.
        places: Of this rank's rows in that dimension.
    """

    tensor: torch.Tensor
    dim: int | None
    places: torch.Tensor

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a tensor of this shape."""
        return whole if self.dim is None else whole.index_select(self.dim, self.places.to(whole.device))


def fact_of(tensor: torch.Tensor) -> Fact:
    """Return what other ranks know of a tensor."""
    values = tensor.detach().double().nan_to_num().flatten()
    ramp = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device)
    return Fact(tuple(tensor.shape), str(tensor.dtype), (float(values.sum()), float(values @ ramp)))


def rows_dim(facts: Sequence[Fact], rows: Sequence[int]) -> int | None:
    """Return in which dimension a tensor has the ranks' own rows; None where all have it alike.

    Args:
        facts: Of each rank's.
        rows: How many rows each rank has.

    Raises:
        ValueError: Ranks have different ones, and not of their rows.
    """
    first = facts[0]
    if all(fact == first for fact in facts):
        return None
    shapes = [fact.shape for fact in facts]
    if len({len(shape) for shape in shapes}) == 1 and len({fact.dtype for fact in facts}) == 1:
        for dim in range(len(first.shape)):
            others = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
            if len(others) == 1 and _counts_rows([shape[dim] for shape in shapes], rows, exactly=dim > 0):
                return dim
    msg = "a tensor of each rank's own that has no rows"
    raise ValueError(msg)


def _counts_rows(sizes: Sequence[int], rows: Sequence[int], *, exactly: bool) -> bool:
    """Return whether sizes are of rows, or, unless exactly, of rows and what they were flattened with."""
    if exactly:
        return list(sizes) == list(rows)
    each = [size / count for size, count in zip(sizes, rows, strict=True)]
    return len(set(each)) == 1 and each[0] >= 1 and each[0] == int(each[0])


def gathered(tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> list[AllRows]:
    """Return tensors of all ranks. Collective.

    Args:
        tensors: This rank's.
        dims: Where they have rows, alike on all ranks.
    """
    own = [each.detach().cpu() for each, dim in zip(tensors, dims, strict=True) if dim is not None]
    ranks = from_all(own)
    rank = dist.get_rank()
    found, place = [], 0
    for tensor, dim in zip(tensors, dims, strict=True):
        if dim is None:
            found.append(AllRows(tensor.detach(), None, torch.arange(0)))
            continue
        parts = [each[place] for each in ranks]
        start = sum(part.size(dim) for part in parts[:rank])
        places = torch.arange(start, start + tensor.size(dim))
        found.append(AllRows(torch.cat(parts, dim).to(tensor.device), dim, places))
        place += 1
    return found


def in_blocks(every: AllRows, rows: Sequence[int], rank: int) -> AllRows:
    """Return a tensor of several sets of rows, one behind the other as `torch.cat([a, b])` has them.

    Args:
        every: Each rank's sets behind those of the rank before.
        rows: How many each rank has in one set.
        rank: This one.
    """
    times = 1 if every.dim is None else len(every.places) // rows[rank]
    if every.dim != 0 or times == 1:
        return every
    starts = list(accumulate(rows, initial=0))
    order = torch.cat(
        [
            torch.arange(count) + times * start + block * count
            for block in range(times)
            for start, count in zip(starts, rows, strict=False)
        ]
    )
    places = torch.isin(order, every.places).nonzero().flatten()
    return AllRows(every.tensor.index_select(0, order.to(every.tensor.device)), 0, places)
