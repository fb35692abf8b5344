"""Decide what the gradient of each reduction of a loss needs, from what all ranks divided it by.

A number that a sum is divided by may be a constant of the script or a count of the rank's own: of tokens that
are no padding, of what is masked, or the sum of weights. One that is not the same on all ranks is a count, and so
is one that becomes another number of elements; until then it is taken for what it looks like.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fsdplaunch.runtime.auto.losses.amounts import Amount, is_count
from fsdplaunch.runtime.auto.losses.graph import BatchReduction

Need = Literal["none", "ranks", "part", "unknown"]
"""Of a gradient: nothing, the number of ranks or the rank's part as a factor, or nothing that is known."""
Amounts = tuple[float, ...]


class ReductionFacts(NamedTuple):
    """What one rank found of a reduction.

    Attributes:
        kind: "sum", "mean" or "unknown".
        amounts: The values of its amounts.
        kinds: Of its amounts.
        name: Of its operation, with those below it.
        certain: Whether its rows are shares of a batch, and not rows that all ranks have.
    """

    kind: str
    amounts: Amounts
    kinds: tuple[str, ...] = ()
    name: str = ""
    certain: bool = True

    @property
    def is_void(self) -> bool:
        """Return whether the script multiplies it by 0, as it does to have a graph where there is nothing."""
        return any(kind == "factor" and not value for kind, value in zip(self.kinds, self.amounts, strict=False))


@dataclass(slots=True)
class ReductionPlan:
    """What one reduction's gradient needs, alike on all ranks.

    Attributes:
        kind: "sum", "mean" or "unknown".
        kinds: Of its amounts.
        first: Its amounts in the first batch, where they were the same on all ranks.
        counted: Which amounts are counts.
        is_told: Whether it was printed that they are.
        is_scaled: Whether a rank multiplies it by a number of its own that is no count.
        alike: Whether all ranks computed it of the same rows.
    """

    kind: str
    kinds: tuple[str, ...]
    first: tuple[float, ...]
    counted: set[int]
    is_told: bool = False
    is_scaled: bool = False
    alike: bool = False

    @property
    def need(self) -> Need:
        """What the gradient needs."""
        if self.kind == "unknown":
            return "unknown"
        if self.counted:
            return "part"
        return "ranks" if self.kind == "sum" else "none"

    def follow(self, ranks: Sequence[Amounts | None]) -> bool:
        """Take for counts what turns out to be; return whether that is news, to be printed.

        Args:
            ranks: The amounts of each rank; None where it has no such reduction.
        """
        before = self.need
        present = [amounts for amounts in ranks if amounts is not None]
        scales = _scales(present, self.kinds)
        unequal = _unequal(present) - scales
        self.is_scaled = self.is_scaled or bool(scales)
        self.counted |= unequal
        if self.kind == "sum":
            self.counted |= {index for index, value in enumerate(present[0]) if self._changes(index, value)}
        is_news = not self.is_told and (bool(unequal) or self.need != before)
        self.is_told = self.is_told or is_news
        return is_news

    def _changes(self, index: int, value: float) -> bool:
        return self.kinds[index] == "divisor" and is_count(value) and value != self.first[index]

    def part(self, rank: int, ranks: Sequence[Amounts | None]) -> float:
        """Return by what to multiply a rank's gradient, so that the mean over ranks is weighted by their counts.

        Args:
            rank: Whose.
            ranks: The amounts of each rank; None where it has no such reduction, which counts nothing.
        """
        part = 1.0
        for index in self.counted:
            values = [0.0 if amounts is None else amounts[index] for amounts in ranks]
            part *= values[rank] * len(values) / sum(values) if any(values) else 1.0
        return part


def plan_reduction(ranks: Sequence[ReductionFacts | None], kinds_of: Sequence[str]) -> ReductionPlan:
    """Return what a reduction's gradient needs, by the first batch.

    Args:
        ranks: What each rank found; None where it has no such reduction.
        kinds_of: Of its amounts; all have as many, of the same kinds.
    """
    facts = [fact for fact in ranks if fact is not None]
    kinds = {fact.kind for fact in facts}
    alike = len({len(fact.amounts) for fact in facts}) == 1
    amounts = [fact.amounts for fact in facts]
    unequal = _unequal(amounts) - _scales(amounts, kinds_of) if alike else set()
    unclear = "unknown" in kinds and not (unequal and len(kinds) > 1)
    kind = "mean" if "mean" in kinds else "sum"
    certain = all(fact.certain for fact in facts)
    if unclear or not alike or not (certain or kinds == {"mean"}):
        kind = "unknown"
    if alike and len(facts) < len(ranks):
        unequal |= _counts(facts, kinds_of)
    return ReductionPlan(kind, tuple(kinds_of), facts[0].amounts, unequal)


def _counts(facts: Sequence[ReductionFacts], kinds: Sequence[str]) -> set[int]:
    """Return the amounts that count elements, of which a rank without such a reduction has none."""
    return {
        index
        for index, kind in enumerate(kinds)
        if kind == "weight" or (kind == "divisor" and all(_is_several(fact.amounts[index]) for fact in facts))
    }


def _is_several(value: float) -> bool:
    return is_count(value) and value > 1


def facts_of(reduction: BatchReduction, name: str, *, certain: bool) -> ReductionFacts:
    """Return what the other ranks are to know of a reduction."""
    amounts: Sequence[Amount] = reduction.amounts
    values, kinds = tuple(each.value for each in amounts), tuple(each.kind for each in amounts)
    return ReductionFacts(reduction.kind, values, kinds, name, certain)


def _scales(ranks: Sequence[Sequence[float]], kinds: Sequence[str]) -> set[int]:
    """Return the amounts that ranks multiply by, each by a number of its own, and that count nothing."""
    pairs = enumerate(zip(kinds, zip(*ranks, strict=True), strict=True))
    own = {index: (kind, each) for index, (kind, each) in pairs if min(each) != max(each)}
    return {
        index
        for index, (kind, each) in own.items()
        if kind == "scale" or (kind == "factor" and not all(is_count(value) for value in each))
    }


def _unequal(ranks: Sequence[Sequence[float]]) -> set[int]:
    return {index for index, values in enumerate(zip(*ranks, strict=True)) if min(values) != max(values)}
