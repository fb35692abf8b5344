"""Match the reductions of all ranks' losses: which of them are one term of the loss of one process.

Needed because a script may decide by a rank's rows what its loss is: `if mask.any(): loss = loss + ...`.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from fsdplaunch.runtime.auto.losses.graph import BatchReduction
from fsdplaunch.runtime.auto.losses.plan import Amounts, ReductionFacts, ReductionPlan, plan_reduction
from fsdplaunch.runtime.auto.losses.row_mixing import is_of_model
from fsdplaunch.runtime.torch_internals.graphs.node_kinds import kind_of

_NAMED_NODES = 20
Ranks = Sequence[Sequence[ReductionFacts]]
"""What each rank found, in the order of its graph."""


class LossTerms:
    """The terms that the losses of all ranks have at a line of the script.

    Attributes:
        names: Of each term, by its operations.
        plans: What each term's gradient needs, alike on all ranks.
        places: For each rank which term each of its reductions is; None for what it multiplies by 0.
        alike: Whether all ranks computed the same rows.
        differ: Whether ranks have as many reductions of the same kinds, of what they computed differently.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.places, self.names = _matched(ranks)
        names = [[fact.name for fact in facts] for facts in ranks]
        self.differ = not self.missing() and any(each != names[0] for each in names)
        self._ends = [list(itertools.accumulate(len(fact.amounts) for fact in facts)) for facts in ranks]
        self.alike = False
        self.plans: list[ReductionPlan] = []
        for term in range(len(self.names)):
            found = [self._of_rank(rank, facts, term) for rank, facts in enumerate(ranks)]
            kinds = next(fact.kinds for fact in found if fact is not None)
            void = all(fact is None or fact.is_void for fact in found)
            self.plans.append(_needs_nothing() if void else plan_reduction(found, kinds))

    def _of_rank(self, rank: int, of_reductions: Sequence[Any], term: int) -> Any:
        found = (each for each, at in zip(of_reductions, self.places[rank], strict=True) if at == term)
        return next(found, None)

    def amounts(self, term: int, ranks: Sequence[Sequence[float]]) -> list[Amounts | None]:
        """Return what each rank divides a term by; None where it has no such term.

        Args:
            term: Its number.
            ranks: All amounts of each rank, in the order of its reductions.
        """
        return [self._of_rank(rank, list(self._split(rank, every)), term) for rank, every in enumerate(ranks)]

    def _split(self, rank: int, every: Sequence[float]) -> Iterator[Amounts]:
        begin = 0
        for end in self._ends[rank]:
            yield tuple(every[begin:end])
            begin = end

    def take_for_means(self) -> None:
        """Take all terms for means over equal shares, whose gradients need nothing."""
        self.alike = True
        self.plans = [_needs_nothing(alike=True) for _ in self.plans]

    def missing(self) -> dict[int, list[int]]:
        """Return the terms that some ranks do not have, with these ranks."""
        without = {
            term: [rank for rank, places in enumerate(self.places) if term not in places]
            for term in range(len(self.names))
        }
        return {term: ranks for term, ranks in without.items() if ranks}

    def exclude_each_other(self) -> bool:
        """Return whether ranks have chosen between losses: none of their terms is the same."""
        sets = [{place for place in places if place is not None} for places in self.places]
        some = [each for each in sets if each]
        return len(some) > 1 and not set.intersection(*some)

    def is_ambiguous(self, term: int) -> bool:
        """Return whether another term has the same operations."""
        return self.names.count(self.names[term]) > 1


def _needs_nothing(*, alike: bool = False) -> ReductionPlan:
    return ReductionPlan("mean", (), (), set(), alike=alike)


def _matched(ranks: Ranks) -> tuple[list[list[int | None]], list[str]]:
    """Return for each rank which term each of its reductions is, and the terms' names."""
    shapes = [[(fact.name.partition(" ")[0], len(fact.amounts)) for fact in facts] for facts in ranks]
    if all(shape == shapes[0] for shape in shapes):
        return [list(range(len(facts))) for facts in ranks], [fact.name for fact in ranks[0]]
    terms: dict[tuple[Any, ...], int] = {}
    places = [[_term(fact, facts[:index], terms) for index, fact in enumerate(facts)] for facts in ranks]
    return places, [name for name, *_ in terms]


def _term(fact: ReductionFacts, before: Sequence[ReductionFacts], terms: dict[tuple[Any, ...], int]) -> int | None:
    """Return the term that has the same operations, in the order in which a rank has several of them."""
    if fact.is_void:
        return None
    earlier = sum(each.name == fact.name and not each.is_void for each in before)
    return terms.setdefault((fact.name, fact.kinds, earlier), len(terms))


def term_name(reduction: BatchReduction) -> str:
    """Return a reduction's operation and those below it, down to what models returned: `Mean Pow Sub`."""
    names, waiting, seen = [reduction.name], [reduction.node], set[Any]()
    while waiting and len(names) < _NAMED_NODES:
        for below, _ in waiting.pop(0).next_functions:
            if below is not None and below not in seen and not is_of_model(below):
                seen.add(below)
                names.append(kind_of(below))
                waiting.append(below)
    return " ".join(names)
