"""What a reduction of a loss is divided by: numbers of rows or elements, or constants of the script."""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from fsdplaunch.runtime.auto.losses.written_numbers import is_written
from fsdplaunch.runtime.torch_internals.graphs.graph_nodes import Factor, counted_elements, scale_factor


class Amount(NamedTuple):
    """A number that a reduction was divided by.

    Attributes:
        value: 0 where the script multiplies or divides by 0, or by 1 since it has counted nothing.
        kind: "weight" of all elements of a mean, or their number; "divisor" of the script's; "factor" for the
            inverse of what the script multiplies by; "scale" for all that a mean is multiplied by.
    """

    value: float
    kind: str


class SumOverRows(NamedTuple):
    """What a sum over rows is that is multiplied by numbers.

    Attributes:
        kind: "sum"; "mean"; "unknown" for what may be both.
        amounts: What it is divided by.
        guessed: Whether it is a mean since it is divided by a number 1 where this rank has one row.
    """

    kind: str
    amounts: tuple[Amount, ...]
    guessed: bool = False


def sum_over_rows(
    node: Any, shape: tuple[int, ...], factors: Sequence[Factor], sizes: Collection[int], ranks: int
) -> SumOverRows:
    """Return what a sum over rows is that is multiplied by numbers.

    Over the number of a rank's rows it is a mean; over the number of all rows it stays a sum. A tensor with a
    smaller number is a count of what is no padding, or not masked, also where all ranks count alike; so is a
    number of elements that the sum's mask has.

    Args:
        node: Of the sum.
        shape: Of what is added up.
        factors: By which the sum is multiplied.
        sizes: How many rows this rank's shares of the batches have.
        ranks: How many ranks share a batch.
    """
    own = {rows * each for rows in {*sizes, *shape[:1]} for each in (1, math.prod(shape[1:]))}
    amounts = tuple(_amount(factor) for factor in factors)
    known = _by_rows(factors, own, ranks) or _by_tensor(factors, amounts, math.prod(shape))
    doubtful = [place for place, each in enumerate(amounts) if _may_be_masked(each, math.prod(shape), known)]
    counted = counted_elements(node) if doubtful else None
    if counted == 0:
        amounts = _without_clamp(amounts)
    elif counted is not None and not known and any(amounts[place].value == counted for place in doubtful):
        known = "mean"
    ones = [each for each in factors if abs(each.value) == 1 and _may_count(each)] if 1 in own else []
    if not known and ones:
        return SumOverRows("mean", amounts, not any(each.is_tensor for each in ones))
    return SumOverRows(known or "sum", amounts)


def _by_rows(factors: Sequence[Factor], own: Collection[int], ranks: int) -> str:
    """Return what a sum is that is divided by a number of rows; "" for one that is not."""
    every = {rows * ranks for rows in own}
    divisors = ((round(1 / abs(each.value), 3), each) for each in factors if 0 < abs(each.value) < 1)
    found = next((divisor for divisor, each in divisors if divisor in own and not _is_constant(each)), 0.0)
    return "" if not found else "unknown" if found in every else "mean"


def _by_tensor(factors: Sequence[Factor], amounts: Sequence[Amount], elements: int) -> str:
    counts = (amount.value for factor, amount in zip(factors, amounts, strict=True) if _is_in_tensor(factor))
    return "mean" if any(is_count(each) and each < elements for each in counts) else ""


def _is_in_tensor(factor: Factor) -> bool:
    return factor.divides and factor.is_tensor


def _may_be_masked(amount: Amount, elements: int, known: str) -> bool:
    """Return whether the elements that count are to be looked at: a divisor of 1, or one that is none yet."""
    is_number = amount.kind == "divisor" and is_count(amount.value)
    return is_number and (amount.value == 1 or (not known and amount.value <= elements))


def _without_clamp(amounts: tuple[Amount, ...]) -> tuple[Amount, ...]:
    """Return the amounts of a sum in which nothing counts: `count.clamp(min=1)` and `max(count, 1)` are 1 there.

    The innermost is it.
    """
    place = max((place for place, each in enumerate(amounts) if each == Amount(1.0, "divisor")), default=None)
    return amounts if place is None else (*amounts[:place], Amount(0.0, "divisor"), *amounts[place + 1 :])


def _may_count(factor: Factor) -> bool:
    """Return whether a factor of 1 may be by one row: nobody writes a division by 1, but `1.0 * loss`."""
    return factor.divides or not (factor.is_tensor or is_written(factor.value))


def _is_constant(factor: Factor) -> bool:
    """Return whether the script multiplies by a number that it has written down: of rows it would compute one."""
    return not factor.divides and not factor.is_tensor and is_written(factor.value)


def void_factor(node: Any) -> tuple[Factor, ...]:
    """Return the 0 that a script multiplies all by before it reduces it: `(output * 0).sum()`; no mask."""
    below = node.next_functions[0][0] if node.next_functions else None
    factor = None if below is None else scale_factor(below)
    return (factor,) if factor is not None and not factor.value and not factor.is_tensor else ()


def is_count(number: float) -> bool:
    """Return whether a number may be how many elements there are."""
    return number >= 1 and number == int(number)


def _amount(factor: Factor) -> Amount:
    value = abs(factor.value)
    inverse = round(1 / value, 9) if 0 < value < math.inf else 0.0
    return Amount(inverse, "divisor" if factor.divides else "factor")


def scales_of_mean(factors: Sequence[Factor]) -> tuple[Amount, ...]:
    """Return what a mean is multiplied by, if it is: a number of the rank's own rows is none of one process."""
    value = math.prod(factor.value for factor in factors)
    return (Amount(float(f"{value:.6g}") if math.isfinite(value) else 0.0, "scale"),) if factors else ()
