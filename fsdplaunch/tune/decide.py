"""Which of two candidates is faster, by a stated rule; and which of many are still in the running. Pure.

Two candidates are measured in turn, one pair of launches per round, so that whatever else the machine does meets
both. The difference of a round is the logarithm of the ratio of its medians.

* One round decides where it and the measurement before it both show 30 % and the quartiles are apart.
* Two rounds decide where both show 15 % and the quartiles are apart.
* From three rounds on, Student's t decides at 99 %, for differences of at least 1 %.
* Where four rounds put the difference within 3 %, or the last round has gone by, there is none.
"""

from collections.abc import Mapping, Sequence
from math import log, sqrt
from statistics import mean, stdev
from typing import Literal, TypeVar

from fsdplaunch.tune.trial import Outcome

Verdict = Literal["first", "second", "equal", "open"]
Pair = tuple[Outcome, Outcome]
MOST_ROUNDS = 5
_AT_ONCE, _IN_TWO, _SMALLEST, _ALIKE = log(1.30), log(1.15), log(1.01), log(1.03)
_T99 = {2: 9.925, 3: 5.841, 4: 4.604}
"""Student's t for 99 %, both sides, by degrees of freedom."""
MARGIN = 1.02
"""A candidate whose fastest quarter of steps is not within this factor of the best median is out."""
Name = TypeVar("Name")


def decide(pairs: Sequence[Pair], before: Pair) -> Verdict:
    """Return which candidate is faster, that neither is, or that another round is needed.

    Args:
        pairs: What each round measured.
        before: The measurements for which the two were chosen.
    """
    if not pairs:
        return "open"
    differences = [_difference(pair) for pair in pairs]
    faster: Verdict = "first" if mean(differences) < 0 else "second"
    if _all_clear([before, *pairs], _AT_ONCE) or (len(pairs) > 1 and _all_clear(pairs, _IN_TWO)):
        return faster
    if len(pairs) > 2:  # noqa: PLR2004  (from three rounds on)
        margin = _T99[len(pairs) - 1] * stdev(differences) / sqrt(len(pairs))
        middle = abs(mean(differences))
        if middle > max(margin, _SMALLEST):
            return faster
        if len(pairs) > 3 and middle + margin < _ALIKE:  # noqa: PLR2004
            return "equal"
    return "equal" if len(pairs) >= MOST_ROUNDS else "open"


def contenders(measured: Mapping[Name, Outcome]) -> list[Name]:
    """Return the candidates that may be the fastest, the fastest first: those not clearly slower than it.

    Args:
        measured: The newest measurement of each that fits.
    """
    ordered = sorted(measured, key=lambda name: measured[name].median)
    if not ordered:
        return []
    limit = measured[ordered[0]].median * MARGIN
    return [name for name in ordered if measured[name].quartiles[0] <= limit]


def _difference(pair: Pair) -> float:
    """Return the logarithm of how much longer the first takes; below 0 where it is faster."""
    return log(pair[0].median / pair[1].median)


def _all_clear(pairs: Sequence[Pair], least: float) -> bool:
    """Return whether the same one is faster in all, by at least so much, and quartiles are apart."""
    differences = [_difference(pair) for pair in pairs]
    same = all(each < 0 for each in differences) or all(each > 0 for each in differences)
    return same and all(abs(each) >= least for each in differences) and all(map(_apart, pairs))


def _apart(pair: Pair) -> bool:
    fast, slow = sorted(pair, key=lambda outcome: outcome.median)
    return fast.quartiles[1] < slow.quartiles[0]
