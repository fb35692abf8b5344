"""The search: candidates are measured, the helpful changes combined, and the best compared in turn.

The two best are launched in turn, one pair per round, so that whatever else the machine does meets both.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import log, sqrt
from operator import attrgetter
from statistics import mean, stdev
from typing import Literal, TypeVar

from fsdplaunch.display_text import size_words
from fsdplaunch.tune.space import Candidate, Space, identity
from fsdplaunch.tune.trial import Outcome

Verdict = Literal["first", "second", "equal", "open"]
Pair = tuple[Outcome, Outcome]
MOST_ROUNDS = 5
_AT_ONCE, _SMALLEST, _ALIKE = log(1.30), log(1.01), log(1.03)
_T99 = {2: 9.925, 3: 5.841, 4: 4.604}  # Student's t for 99 %, both sides, by degrees of freedom
Name = TypeVar("Name")


def decide(pairs: Sequence[Pair], before: Pair) -> Verdict:
    """Return which candidate is faster, that neither is, or that another round is needed.

    The difference of a round is the logarithm of the ratio of its medians.

    * One round decides where it and the measurement before it both show 30 % and the quartiles are apart.
    * From three rounds on, Student's t decides at 99 %, for differences of at least 1 %.
    * Where four rounds put the difference within 3 %, or the last round has gone by, there is none.
    """
    if not pairs:
        return "open"
    differences = [log(first.median / second.median) for first, second in (before, *pairs)]
    clear = [
        abs(difference) >= _AT_ONCE and min(pair, key=_median).quartiles[1] < max(pair, key=_median).quartiles[0]
        for difference, pair in zip(differences, (before, *pairs), strict=True)
    ]
    middle = mean(differences[1:])
    faster: Verdict = "first" if middle < 0 else "second"
    if all(clear) and len({difference < 0 for difference in differences}) == 1:
        return faster
    if len(pairs) > 2:  # noqa: PLR2004  (from three rounds on)
        margin = _T99[len(pairs) - 1] * stdev(differences[1:]) / sqrt(len(pairs))
        if abs(middle) > max(margin, _SMALLEST):
            return faster
        if len(pairs) > 3 and abs(middle) + margin < _ALIKE:  # noqa: PLR2004
            return "equal"
    return "equal" if len(pairs) >= MOST_ROUNDS else "open"


_median = attrgetter("median")


def contenders(measured: Mapping[Name, Outcome]) -> list[Name]:
    """Return the candidates that may be the fastest, the fastest first: middle steps meet its own."""
    ordered = sorted(measured, key=lambda name: measured[name].median)
    return [name for name in ordered if measured[name].quartiles[0] <= measured[ordered[0]].quartiles[1]]


State = Literal["waiting", "measured", "slower", "as fast", "does not fit", "failed", "not run", "same run"]


class SearchStopped(Exception):  # noqa: N818  (no error: what is known counts)
    """The user stopped the search."""


class CannotMeasureError(Exception):
    """No candidate can be measured, for a reason that the first one shows."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One candidate, and what is known of it."""

    candidate: Candidate  # the changes
    state: State = "waiting"  # where it stands
    reason: str = ""  # why it was not run, failed, or does not fit
    outcomes: list[Outcome] = field(default_factory=list)  # of its launches, oldest first

    @property
    def fastest(self) -> Outcome | None:
        """Return the launch with the fastest median, which other processes disturbed least; None without one."""
        return min((one for one in self.outcomes if not one.failure), key=_median, default=None)

    @property
    def fits(self) -> bool:
        """Return whether it was measured and needs no more memory than it may."""
        return self.state in ("measured", "slower", "as fast") and self.fastest is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """Two candidates, measured in turn."""

    first: Candidate  # the faster one so far
    second: Candidate  # the other
    rounds: Sequence[Pair]  # what each round measured
    verdict: Verdict  # what came of it; `open` when it was stopped before

    @property
    def kept(self) -> Candidate:
        """Return the one to take: the faster, or of equal ones the one with fewer changes."""
        if self.verdict == "equal":
            return min(self.first, self.second, key=lambda candidate: len(candidate.changes))
        return self.second if self.verdict == "second" else self.first


_GAIN = 0.98
"""A change whose step is below this share of yours, and below most of your steps, is tried with others."""
_MOST_TOGETHER = 6  # combinations that are tried at a time
_TIMES = 3  # how often the best is combined with one more change


@dataclass(slots=True, kw_only=True)
class Search:
    """One search."""

    space: Space  # what may be tried
    trial: Callable[[Candidate, int], Outcome]  # runs a candidate for so many measured steps
    limit: int | None  # bytes that a rank may need; None where nothing limits it
    steps: int  # measured steps of a launch
    rows: dict[Candidate, Row] = field(default_factory=dict)  # every candidate, in the order in which they came up
    duels: list[Duel] = field(default_factory=list)  # the last comparisons
    _seen: dict[object, Candidate] = field(default_factory=dict)

    def run(self) -> Candidate | None:
        """Search to the end and return the candidate to take; None when none fits.

        When the user stops it (SearchStopped), rows and duels hold what is known.
        """
        singles = self.space.singles()
        self._try_all([Candidate(), *singles])
        if self.best() is None:
            # Look for a candidate that fits: two changes together, then what is only done for want of memory.
            alive = [each for each in singles if self.rows[each].state != "same run"]
            pairs = [first.with_changes(second) for first, second in combinations(alive, 2)]
            self._try_all(pairs, most=2 * _MOST_TOGETHER)
            if self.best() is None:
                last = self.space.last_resorts()
                more = [each.with_changes(single) for each in last for single in alive]
                self._try_all([*last, *more], most=_MOST_TOGETHER)
        for _ in range(_TIMES):  # one more helpful change to the best, as long as that helps
            base = self.best()
            if base is None:
                return None
            helpers = [single for single in singles if self._may_help(single, base)]
            self._try_all([base.with_changes(single) for single in helpers], most=_MOST_TOGETHER)
            if self.best() == base:
                break
        return self._choose_fastest()

    def best(self) -> Candidate | None:
        """Return the fastest candidate that fits, by what is known now."""
        return next(iter(contenders(self._fitting())), None)

    def _fitting(self) -> dict[Candidate, Outcome]:
        return {each: row.fastest for each, row in self.rows.items() if row.fits and row.fastest is not None}

    def _try_all(self, candidates: Iterable[Candidate], most: int | None = None) -> None:
        """Measure new candidates, unless they are a run that is known; `most` of those that the rules allow."""
        new = [each for each in dict.fromkeys(candidates) if each not in self.rows]
        if most is not None:
            new = [each for each in new if self.space.config(each) is not None][:most]
        rows = [self.rows.setdefault(candidate, Row(candidate=candidate)) for candidate in new]
        for row in rows:
            config = self.space.config(row.candidate)
            known = row.candidate
            if config is not None:
                known = self._seen.setdefault(identity(config, self.space.world), row.candidate)
            if config is None:
                row.state, row.reason = "not run", "the rules refuse it"
            elif known != row.candidate:
                row.state, row.reason = "same run", f"the same run as {known.label}"
            else:
                self._measure(row)
        running = set(contenders(self._fitting()))
        for candidate in self._fitting():
            self.rows[candidate].state = "measured" if candidate in running else "slower"

    def _measure(self, row: Row) -> Outcome:
        outcome = self.trial(row.candidate, self.steps)
        row.outcomes.append(outcome)
        if outcome.failure:
            row.state, row.reason = "failed", outcome.failure
        elif self.limit is not None and outcome.memory > self.limit:
            row.state, row.reason = "does not fit", f"{size_words(outcome.memory)} of {size_words(self.limit)}"
        else:
            row.state = "measured"
        if row.candidate.is_yours and len(row.outcomes) == 1 and outcome.kind in ("write", "error"):
            raise CannotMeasureError(outcome.failure)
        return outcome

    def _may_help(self, single: Candidate, base: Candidate) -> bool:
        """Return whether a change of another key gained by itself; where yours does not fit, whether it may."""
        row, yours = self.rows[single], self.rows[Candidate()]
        if dict(base.changes).keys() & dict(single.changes).keys() or row.state == "same run":
            return False
        if not yours.fits or yours.fastest is None:
            return row.state != "failed" or bool(row.outcomes and row.outcomes[-1].kind == "memory")
        least = min(_GAIN * yours.fastest.median, yours.fastest.quartiles[0])
        return row.fits and row.fastest is not None and row.fastest.median < least

    def _choose_fastest(self) -> Candidate | None:
        """Let the two best meet, and then the better one and yours: what is proposed must be faster than that."""
        measured = self._fitting()
        ordered = sorted(measured, key=lambda candidate: measured[candidate].median)
        if not ordered:
            return None
        best, yours, rivals = ordered[0], Candidate(), ordered[1:2]
        if yours in ordered[2:] and not best.is_yours:  # it comes first where it may be as fast
            rivals.insert(0 if yours in contenders(measured) else 1, yours)
        for rival in rivals:
            best = self._meet(best, rival)
            if best.is_yours:
                break
        return best

    def _meet(self, first: Candidate, second: Candidate) -> Candidate:
        """Measure two candidates in turn until it is clear which is faster, or that neither is."""
        rows, measured = (self.rows[first], self.rows[second]), self._fitting()
        before = measured[first], measured[second]
        duel = Duel(first=first, second=second, rounds=(), verdict="open")
        self.duels.append(duel)
        while duel.verdict == "open":
            for row in rows if len(duel.rounds) % 2 == 0 else rows[::-1]:
                if self._measure(row).failure:
                    return second if row is rows[0] else first
            rounds = (*duel.rounds, (rows[0].outcomes[-1], rows[1].outcomes[-1]))
            duel = Duel(first=first, second=second, rounds=rounds, verdict=decide(rounds, before))
            self.duels[-1] = duel
        other = second if duel.kept == first else first
        self.rows[other].state = "as fast" if duel.verdict == "equal" else "slower"
        self.rows[duel.kept].state = "measured"
        return duel.kept
