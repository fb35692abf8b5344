"""Compare the gradients of ranks' losses with those of the loss that one process computes of all rows.

A loss is computed again from what models returned and from the batch, with the rows of all ranks, and gradients of
what models returned are compared. Nothing is known where the calls cannot be made again to the same result.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdplaunch.runtime.auto.losses.first_batches.all_rows import AllRows, gathered, in_blocks
from fsdplaunch.runtime.auto.losses.first_batches.causes import cause_of, place_of
from fsdplaunch.runtime.auto.losses.first_batches.numbers import Change, as_given, has_unclear, of_all_rows
from fsdplaunch.runtime.auto.losses.first_batches.own_loss import OwnLoss, gradients_of, leaves_of
from fsdplaunch.runtime.auto.losses.first_batches.rank_programs import are_alike, dims_of_rows, own_number, sent_of
from fsdplaunch.runtime.collectives.rank_group import from_all, from_rank_0

_MOST_ALIKE = 1 << 16
"""Elements of a gradient that ranks have for something that all have alike."""
_CLOSE, _CLOSE_HALF = 1e-3, 5e-2
_ROUNDING = 1e-6
"""Of the largest gradient."""


class _Way(NamedTuple):
    """How a loss is computed of all rows.

    Attributes:
        tensors: What its program is given.
        change: What numbers are of all rows.
    """

    tensors: dict[int, AllRows]
    change: Change


class Difference(NamedTuple):
    """Gradients that are not those of one process.

    Attributes:
        far: A part of the gradients; 0.0 for equal ones, inf where ranks have numbers of their own.
        cause: What was computed of a rank's own rows, with the script's line; "" where that is not known.
    """

    far: float
    cause: str


class _Apart(NamedTuple):
    """How far two sets of gradients are from each other.

    Attributes:
        far: Relative to the larger ones.
        factor: By which the first are to be multiplied to be the others; 0 for no such factor.
    """

    far: float
    factor: float


def difference(own: OwnLoss | None, rows: int, counts: Collection[float]) -> Difference | None:
    """Return by how much ranks' gradients are other than those of one process; None if not known. Collective.

    Args:
        own: The loss of this rank; None where it could not be computed again.
        rows: How many rows this rank has.
        counts: Numbers of its own by which its gradients are weighted.

    Returns:
        The same on all ranks.
    """
    looks = own is not None and rows > 1  # one row looks like any other dimension of one
    ranks = from_all(sent_of(own, rows, counts) if own is not None and looks else None)
    if own is None or None in ranks or not are_alike(ranks):
        return None
    numbers = own_number(own.program, ranks)
    if numbers:
        return Difference(math.inf, f"{place_of(numbers)} is given each rank's own")
    dims = dims_of_rows(ranks)
    if dims is None:
        return None
    tensors = dict(zip(own.tensors, gathered(list(own.tensors.values()), dims), strict=True))
    rows_of = [each.rows for each in ranks]
    changes = _changes(rows, sum(rows_of))
    ways = [_Way(layout, change) for layout in _layouts(tensors, rows_of) for change in changes]
    found = from_all(_compared(own, tensors, ways))
    if None in found or not any(from_all(any(bool(each.any()) for each in own.gradients.values()))):
        return None
    causes = (cause_of(own, way.tensors, way.change) for way in ways)
    return Difference(max(found), from_rank_0(next(filter(None, causes), "")) if any(found) else "")


def _layouts(tensors: dict[int, AllRows], rows: Sequence[int]) -> list[dict[int, AllRows]]:
    """Return the orders in which the rows of all ranks may be: sets of rows may be one behind the other."""
    rank = dist.get_rank()
    sets = {number: in_blocks(each, rows, rank) for number, each in tensors.items()}
    return [tensors] if all(sets[number] is each for number, each in tensors.items()) else [tensors, sets]


def _changes(rows: int, together: int) -> list[Change]:
    """Return what numbers may be of all rows, the likeliest first."""
    ways = itertools.product((True, False), repeat=2)
    return [of_all_rows(rows, together, sizes=sizes, factors=factors) for factors, sizes in ways]


def _compared(own: OwnLoss, tensors: dict[int, AllRows], ways: Sequence[_Way]) -> float | None:
    """Return the difference to what is computed of all rows, by the first way in which that succeeds.

    None where none does, or where another comes to no difference: a number may be of rows or not.
    """
    mine = _mean_of_alike(own, tensors)
    if not mine:
        return None
    close = _CLOSE if all(each.dtype in (torch.float32, torch.float64) for each in mine.values()) else _CLOSE_HALF
    tried = (_apart_by(own, mine, way) for way in (*ways, _Way(tensors, as_given)))
    found = [each for each in tried if each is not None]
    if not found or found[0].far <= close:
        return 0.0 if found else None
    unclear = any(each.far <= close for each in found) or (found[0].factor and has_unclear(own.program))
    return None if unclear else found[0].far


def _mean_of_alike(own: OwnLoss, tensors: dict[int, AllRows]) -> dict[int, torch.Tensor]:
    """Return this rank's gradients; the mean over ranks of those for what all have alike. Collective.

    Empty where ranks have gradients of different tensors.
    """
    small = [n for n, each in own.gradients.items() if tensors[n].dim is None and each.numel() <= _MOST_ALIKE]
    ranks = from_all({number: own.gradients[number].cpu() for number in small})
    if any(each.keys() != ranks[0].keys() for each in ranks):
        return {}
    means = {number: sum(each[number] for each in ranks) / len(ranks) for number in small}
    known = {number: each for number, each in own.gradients.items() if tensors[number].dim is not None}
    return {**known, **{number: each.to(own.gradients[number].device) for number, each in means.items()}}


def _apart_by(own: OwnLoss, mine: dict[int, torch.Tensor], way: _Way) -> _Apart | None:
    """Return how far gradients are from those of one process, computed in one way; None if that fails."""
    with suppress(Exception):  # of torch: numbers that do not fit
        given = leaves_of({number: each.tensor for number, each in way.tensors.items()}, mine.__contains__)
        whole = gradients_of(own.program.run(given, way.change), given)
        return _apart([(each, _part(whole[number], way.tensors[number])) for number, each in mine.items()])
    return None


def _part(gradient: torch.Tensor, of: AllRows) -> torch.Tensor:
    """Return this rank's rows of the gradient of one process, as they are before the mean over ranks."""
    return gradient if of.dim is None else of.own(gradient) * dist.get_world_size()


def _apart(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> _Apart:
    every = [(mine.double(), whole.double()) for mine, whole in pairs if mine.numel()]
    largest = max((_most(mine, whole) for mine, whole in every), default=0.0)
    ranks = float(dist.get_world_size())
    factors = (each for each in (ranks, 1 / ranks) if _far(every, each, largest) < _CLOSE)
    return _Apart(_far(every, 1.0, largest), next(factors, 0.0))


def _far(every: Sequence[tuple[torch.Tensor, torch.Tensor]], factor: float, largest: float) -> float:
    """Return how far gradients, times a factor, are from others, relative to the largest of each tensor."""
    found = [0.0]
    for mine, whole in every:
        size = max(_most(mine * factor, whole), _ROUNDING * largest, 1e-30)
        found.append(float((mine * factor - whole).abs().max()) / size)
    return max(found)


def _most(*tensors: torch.Tensor) -> float:
    return max(float(each.abs().max()) for each in tensors)
