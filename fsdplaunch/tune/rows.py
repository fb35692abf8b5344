"""What a search knows: a row per candidate, and the comparisons of the best."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fsdplaunch.tune.candidate import Candidate
from fsdplaunch.tune.decide import Pair, Verdict
from fsdplaunch.tune.outcome import Outcome

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
        predicted: Bytes per rank that were expected before it was run; None where nothing was.
    """

    candidate: Candidate
    state: State = "waiting"
    reason: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    predicted: int | None = None

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
