"""The search: candidates are measured, the helpful changes combined, and the best compared in turn.

The two best are launched in turn, one pair per round, so that whatever else the machine does meets both.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import log, sqrt
from statistics import mean, stdev
from typing import Literal, TypeVar

from fsdplaunch.display_text import size_words
from fsdplaunch.tune.space import Candidate, Space, identity
from fsdplaunch.tune.trial import Outcome

Verdict = Literal["first", "second", "equal", "open"]
Pair = tuple[Outcome, Outcome]
MOST_ROUNDS = 5
_AT_ONCE, _IN_TWO, _SMALLEST, _ALIKE = log(1.30), log(1.15), log(1.01), log(1.03)
_T99 = {2: 9.925, 3: 5.841, 4: 4.604}
"""Student's t for 99 %, both sides, by degrees of freedom."""
Name = TypeVar("Name")


def decide(pairs: Sequence[Pair], before: Pair) -> Verdict:
    """Return which candidate is faster, that neither is, or that another round is needed.

    The difference of a round is the logarithm of the ratio of its medians.

    * One round decides where it and the measurement before it both show 30 % and the quartiles are apart.
    * Two rounds decide where both show 15 % and the quartiles are apart.
    * From three rounds on, Student's t decides at 99 %, for differences of at least 1 %.
    * Where four rounds put the difference within 3 %, or the last round has gone by, there is none.

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
    """Return the candidates that may be the fastest, the fastest first: middle steps meet its own.

    Args:
        measured: The newest measurement of each that fits.
    """
    ordered = sorted(measured, key=lambda name: measured[name].median)
    return [name for name in ordered if measured[name].quartiles[0] <= measured[ordered[0]].quartiles[1]]


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


State = Literal[
    "waiting", "running", "measured", "slower", "as fast", "does not fit", "failed", "not run", "same run"
]


class SearchStopped(Exception):  # noqa: N818  (no error: what is known counts)
    """The user stopped the search."""


class CannotMeasureError(Exception):
    """No candidate can be measured, for a reason that the first one shows."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One candidate, and what is known of it.

    Attributes:
        candidate: The changes.
        state: Where it stands.
        reason: Why it was not run, failed, or does not fit.
        outcomes: Of its launches, oldest first.
    """

    candidate: Candidate
    state: State = "waiting"
    reason: str = ""
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def fastest(self) -> Outcome | None:
        """Return the launch with the fastest median, which other processes disturbed least; None without one."""
        return min((one for one in self.outcomes if not one.failure), key=lambda one: one.median, default=None)

    @property
    def most_steps(self) -> int:
        """Return the steps of its longest measurement."""
        return max((len(one.seconds) for one in self.outcomes), default=0)

    @property
    def fits(self) -> bool:
        """Return whether it was measured and needs no more memory than it may."""
        states = ("measured", "slower", "as fast", "running")
        return self.state in states and self.fastest is not None and not self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """Two candidates, measured in turn.

    Attributes:
        first: The faster one so far.
        second: The other.
        rounds: What each round measured.
        verdict: What came of it; `open` when it was stopped before.
    """

    first: Candidate
    second: Candidate
    rounds: Sequence[Pair]
    verdict: Verdict

    @property
    def kept(self) -> Candidate:
        """Return the one to take: the faster, or of equal ones the one with fewer changes."""
        if self.verdict == "equal":
            return min(self.first, self.second, key=lambda candidate: len(candidate.changes))
        return self.second if self.verdict == "second" else self.first


Trial = Callable[[Candidate, int], Outcome]
"""Runs a candidate for so many measured steps."""
_RUNGS = 2
"""How often the steps are doubled for those that are left, before the two best meet."""
_GAIN = 0.98
"""A change whose step is below this share of yours, and below most of your steps, is tried with others."""
_MOST_TOGETHER = 6
"""Combinations that are tried at a time."""
_TIMES = 3
"""How often the best is combined with one more change."""


@dataclass(slots=True, kw_only=True)
class Search:
    """One search.

    Attributes:
        space: What may be tried.
        trial: Runs a candidate.
        limit: Bytes that a rank may need; None where nothing limits it.
        steps: Measured steps of a first launch.
        changed: Called whenever a row has changed.
        rows: Every candidate, in the order in which they came up.
        duels: The last comparisons.
    """

    space: Space
    trial: Trial
    limit: int | None
    steps: int
    changed: Callable[[], None] = lambda: None
    rows: dict[Candidate, Row] = field(default_factory=dict)
    duels: list[Duel] = field(default_factory=list)
    _seen: dict[object, Candidate] = field(default_factory=dict)
    _singles: list[Candidate] = field(default_factory=list)

    def run(self) -> Candidate | None:
        """Search to the end and return the candidate to take; None when none fits.

        Raises:
            SearchStopped: The user stopped it; rows and duels hold what is known.
            CannotMeasureError: The first candidate shows that none can be measured.
        """
        self._singles = self.space.singles()
        self._try_all([Candidate(), *self._singles])
        self._combine()
        return self._choose_fastest()

    def best(self) -> Candidate | None:
        """Return the fastest candidate that fits, by what is known now."""
        running = contenders(self._fitting())
        return running[0] if running else None

    def _fitting(self) -> dict[Candidate, Outcome]:
        return {each: row.fastest for each, row in self.rows.items() if row.fits and row.fastest is not None}

    def _try_all(self, candidates: Iterable[Candidate]) -> None:
        """Measure new candidates, then those again that may be the fastest, half of them at a time."""
        new = [candidate for candidate in candidates if candidate not in self.rows]
        for candidate in new:
            self.rows[candidate] = Row(candidate=candidate)
        self.changed()
        for candidate in new:
            self._try(self.rows[candidate])
        steps = self.steps
        for _ in range(_RUNGS):
            running = contenders(self._fitting())
            if len(running) <= 2:  # noqa: PLR2004  (the two that meet)
                break
            steps *= 2
            for candidate in running[: max(2, (len(running) + 1) // 2)]:
                if self.rows[candidate].most_steps < steps:
                    self._measure(self.rows[candidate], steps)
        self._mark_slower()

    def _mark_slower(self) -> None:
        running = set(contenders(self._fitting()))
        for candidate in self._fitting():
            self.rows[candidate].state = "measured" if candidate in running else "slower"
        self.changed()

    def _try(self, row: Row) -> None:
        """Measure a candidate for the first time, unless it is a run that is known or cannot fit."""
        config = self.space.config(row.candidate)
        if config is None:
            row.state, row.reason = "not run", "the rules refuse it"
            return
        twin = self._seen.setdefault(identity(config, self.space.world), row.candidate)
        if twin != row.candidate:
            row.state, row.reason = "same run", f"the same run as {twin.label}"
        else:
            self._measure(row, self.steps)
        self.changed()

    def _measure(self, row: Row, steps: int) -> Outcome:
        before, row.state = row.state, "running"
        self.changed()
        try:
            outcome = self.trial(row.candidate, steps)
        except SearchStopped:
            row.state = before
            raise
        row.outcomes.append(outcome)
        if outcome.failure:
            row.state, row.reason = "failed", outcome.failure
        elif self.limit is not None and outcome.memory > self.limit:
            row.state, row.reason = "does not fit", f"{size_words(outcome.memory)} of {size_words(self.limit)}"
        else:
            row.state = "measured"
        self.changed()
        alone = row.candidate.is_yours and len(row.outcomes) == 1
        if alone and outcome.kind in ("write", "error"):
            raise CannotMeasureError(outcome.failure)
        return outcome

    def _combine(self) -> None:
        """Add one more helpful change to the best candidate, as long as that helps."""
        if self.best() is None:
            self._find_any()
        for _ in range(_TIMES):
            base = self.best()
            if base is None:
                return
            helpers = [single for single in self._singles if self._may_help(single, base)]
            together = dict.fromkeys(base.with_changes(single) for single in helpers)
            self._try_all(self._valid(together)[:_MOST_TOGETHER])
            if self.best() == base:
                return

    def _find_any(self) -> None:
        """Look for a candidate that fits: two changes together, then what is only done for want of memory."""
        alive = [each for each in self._singles if self.rows[each].state != "same run"]
        pairs = [first.with_changes(second) for first, second in combinations(alive, 2)]
        self._try_all(self._valid(dict.fromkeys(pairs))[: 2 * _MOST_TOGETHER])
        if self.best() is None:
            last = self.space.last_resorts()
            more = [each.with_changes(single) for each in last for single in alive]
            self._try_all(self._valid(dict.fromkeys([*last, *more]))[:_MOST_TOGETHER])

    def _valid(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        return [each for each in candidates if each not in self.rows and self.space.config(each) is not None]

    def _may_help(self, single: Candidate, base: Candidate) -> bool:
        """Return whether a change of another key gained by itself; where yours does not fit, whether it may."""
        taken = {path for path, _ in base.changes}
        row, yours = self.rows[single], self.rows[Candidate()]
        if taken & {path for path, _ in single.changes} or row.state == "same run":
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
        rows = self.rows[first], self.rows[second]
        measured = self._fitting()
        before = measured[first], measured[second]
        rounds: list[Pair] = []
        verdict: Verdict = "open"
        place = len(self.duels)
        while verdict == "open":
            self.duels[place:] = [Duel(first=first, second=second, rounds=tuple(rounds), verdict="open")]
            order = rows if len(rounds) % 2 == 0 else rows[::-1]
            for row in order:
                if self._measure(row, self.steps).failure:
                    return second if row is rows[0] else first
            pair = rows[0].outcomes[-1], rows[1].outcomes[-1]
            rounds.append(pair)
            verdict = decide(rounds, before)
        duel = Duel(first=first, second=second, rounds=tuple(rounds), verdict=verdict)
        self.duels[place:] = [duel]
        other = second if duel.kept == first else first
        self.rows[other].state = "as fast" if verdict == "equal" else "slower"
        self.rows[duel.kept].state = "measured"
        self.changed()
        return duel.kept
