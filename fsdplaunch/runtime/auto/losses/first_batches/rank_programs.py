"""Compare by which calls, and from what, ranks compute a loss: what of it are rows, and what own numbers."""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from fsdplaunch.runtime.auto.losses.first_batches.all_rows import Fact, fact_of, rows_dim
from fsdplaunch.runtime.auto.losses.first_batches.numbers import Signature, signatures_of
from fsdplaunch.runtime.auto.losses.first_batches.own_loss import OwnLoss
from fsdplaunch.runtime.auto.losses.first_batches.program import Call, Given, Program, marks

MOST_ELEMENTS = 8 << 20
"""Of all that is gathered from one rank."""


class Sent(NamedTuple):
    """What one rank sends before tensors are gathered.

    Attributes:
        calls: Of its program.
        rows: How many it has.
        facts: Of the tensors that its program is given.
        fixed: Which of them have no gradients.
        counts: Numbers of its own by which its gradients are weighted.
    """

    calls: list[Signature]
    rows: int
    facts: list[Fact]
    fixed: list[bool]
    counts: list[float]


def sent_of(own: OwnLoss, rows: int, counts: Collection[float]) -> Sent:
    """Return what a rank sends of its loss."""
    tensors = own.tensors.values()
    fixed = [not each.requires_grad and each.is_floating_point() for each in tensors]
    return Sent(signatures_of(own.program), rows, [fact_of(each) for each in tensors], fixed, list(counts))


def are_alike(ranks: Sequence[Sent]) -> bool:
    """Return whether ranks compute by the same calls, whatever their numbers are."""
    shapes = [([call[:2] for call in each.calls], len(each.facts)) for each in ranks]
    return all(shape == shapes[0] for shape in shapes)


def own_number(program: Program, ranks: Sequence[Sent]) -> Call | None:
    """Return the first call with a number of each rank's own that counts no rows, such as a running average."""
    counts = [number for each in ranks for number in each.counts]
    for number, signatures in zip(program.calls, zip(*(each.calls for each in ranks), strict=True), strict=True):
        call = program.calls[number]
        pairs = zip(*(each.numbers for each in signatures), strict=False)
        given = (each.number for each in marks(call.args, call.kwargs) if isinstance(each, Given))
        tensors = (_single_values(program, ranks, each) for each in given)
        if any(_are_own(each, counts) for each in (*pairs, *tensors)):
            return call
    return None


def _single_values(program: Program, ranks: Sequence[Sent], number: int) -> tuple[float, ...]:
    """Return the sums of a tensor without gradients that is of no rows by its shape; () of another one."""
    place = program.inputs.index(number)
    facts = [each.facts[place] for each in ranks]
    shape = facts[0].shape
    single = not shape or (shape[0] == 1 and all(each.rows > 1 for each in ranks))
    alike = all(fact.shape == shape and each.fixed[place] for fact, each in zip(facts, ranks, strict=True))
    return tuple(fact.values[0] for fact in facts) if single and alike else ()


def _are_own(numbers: Sequence[float], counts: Sequence[float]) -> bool:
    """Return whether ranks have different numbers, which are none that their gradients are weighted by."""
    if not numbers or all(_is_close(each, numbers[0]) for each in numbers):
        return False
    if all(type(each) is int for each in numbers):
        return False  # of rows or places
    return not any(_is_close(abs(each), one) for each in numbers for count in counts for one in _both(count))


def _both(count: float) -> Iterator[float]:
    yield count
    if count:
        yield 1 / count


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-12)


def dims_of_rows(ranks: Sequence[Sent]) -> list[int | None] | None:
    """Return where each tensor has ranks' rows; None where that is not known, or too much is to be sent."""
    if any([call.numbers for call in each.calls] != [call.numbers for call in ranks[0].calls] for each in ranks):
        return None
    rows = [each.rows for each in ranks]
    try:
        dims = [rows_dim(facts, rows) for facts in zip(*(each.facts for each in ranks), strict=True)]
    except ValueError:
        return None
    sizes = (zip(each.facts, dims, strict=True) for each in ranks)
    elements = [sum(math.prod(fact.shape) for fact, dim in each if dim is not None) for each in sizes]
    return dims if 0 < max(elements) <= MOST_ELEMENTS else None
