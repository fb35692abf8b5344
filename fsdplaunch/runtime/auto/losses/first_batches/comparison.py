"""Compare the gradients of ranks' losses with those of the loss that one process computes of all rows.

A loss is computed again from what models returned and from the batch, with the rows of all ranks, and gradients of
what models returned are compared. Nothing is known where the calls cannot be made again to the same result.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdplaunch.runtime.auto.losses.first_batches.all_rows import AllRows, gathered
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
    ranks = from_all(None if own is None or not rows else sent_of(own, rows, counts))
    if own is None or None in ranks or not are_alike(ranks):
        return None
    numbers = own_number(own.program, ranks)
    if numbers:
        return Difference(math.inf, f"{place_of(numbers)} is given each rank's own")
    dims = dims_of_rows(ranks)
    if dims is None:
        return None
    tensors = dict(zip(own.tensors, gathered(list(own.tensors.values()), dims), strict=True))
    together = sum(each.rows for each in ranks)
    changes = [of_all_rows(rows, together, sizes=sizes) for sizes in (True, False)]
    found = from_all(_compared(own, tensors, changes))
    if None in found:
        return None
    causes = (cause_of(own, tensors, change) for change in changes)
    return Difference(max(found), from_rank_0(next(filter(None, causes), "")) if any(found) else "")


def _compared(own: OwnLoss, tensors: dict[int, AllRows], changes: Sequence[Change]) -> float | None:
    """Return the difference to what is computed of all rows, by the first numbers with which that succeeds.

    None where none does, or where others come to no difference: a number may be of rows or not.
    """
    mine = _mean_of_alike(own, tensors)
    known = [_apart_by(own, tensors, mine, change) for change in changes]
    as_it_is = _apart_by(own, tensors, mine, as_given)
    close = _CLOSE if all(each.dtype in (torch.float32, torch.float64) for each in mine.values()) else _CLOSE_HALF
    if not mine:
        return None
    if any(each is not None and each.far <= close for each in (*known, as_it_is)):
        first = next((each for each in known if each is not None), as_it_is)
        return 0.0 if first is not None and first.far <= close else None
    first = next((each for each in known if each is not None), None)
    return None if first is None or (first.factor and has_unclear(own.program)) else first.far


def _mean_of_alike(own: OwnLoss, tensors: dict[int, AllRows]) -> dict[int, torch.Tensor]:
    """Return this rank's gradients; the mean over ranks of those for what all have alike. Collective."""
    small = [n for n, each in own.gradients.items() if tensors[n].dim is None and each.numel() <= _MOST_ALIKE]
    ranks = from_all([own.gradients[number].cpu() for number in small])
    means = {number: sum(each[place] for each in ranks) / len(ranks) for place, number in enumerate(small)}
    known = {number: each for number, each in own.gradients.items() if tensors[number].dim is not None}
    return {**known, **{number: each.to(own.gradients[number].device) for number, each in means.items()}}


def _apart_by(
    own: OwnLoss, tensors: dict[int, AllRows], mine: dict[int, torch.Tensor], change: Change
) -> _Apart | None:
    """Return how far gradients are from those of one process, whose numbers are changed so; None if it fails."""
    with suppress(Exception):  # of torch: numbers that do not fit
        given = leaves_of({number: each.tensor for number, each in tensors.items()}, mine.__contains__)
        whole = gradients_of(own.program.run(given, change), given)
        return _apart([(each, _part(whole[n], tensors[n], each)) for n, each in mine.items()])
    return None


def _part(gradient: torch.Tensor, of: AllRows, mine: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of the gradient of one process, as they are before the mean over ranks."""
    if of.dim is None:
        return gradient
    return gradient.narrow(of.dim, of.start, mine.size(of.dim)) * dist.get_world_size()


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
