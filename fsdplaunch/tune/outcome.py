"""What came of one trial, as plain values that a file keeps."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

_FEWEST = 2
"""Values that quartiles need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One launch of one candidate.

    Attributes:
        seconds: Of each measured step, on the slowest rank; empty where nothing was measured.
        memory: Peak bytes on the rank that needed most: of the GPU's allocator, or resident on the CPU.
        start: Bytes a CPU rank had before the script began.
        rows: Per second over all ranks; None where no loader told.
        tokens: The same.
        waiting: Share of the time spent in collectives; None where that cannot be told.
        wall: Seconds of the whole launch.
        failure: Why there is no measurement; "" where there is one.
        kind: Of failure: `memory`, `time`, `write`, `stopped` or `error`; "" without one.
        model: What rank 0 found out about the model; empty where nothing was measured.
    """

    seconds: tuple[float, ...] = ()
    memory: int = 0
    start: int = 0
    rows: float | None = None
    tokens: float | None = None
    waiting: float | None = None
    wall: float = 0.0
    failure: str = ""
    kind: str = ""
    model: Mapping[str, Any] | None = None

    @property
    def median(self) -> float:
        """Return the median step in seconds."""
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Return the seconds under which a quarter and three quarters of the steps were."""
        return quartiles(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        found = {name: getattr(self, name) for name in Outcome.__dataclass_fields__}
        return {**found, "seconds": [round(each, 6) for each in self.seconds]}


def quartiles(seconds: tuple[float, ...]) -> tuple[float, float]:
    """Return the lower and the upper quartile."""
    if len(seconds) < _FEWEST:
        return seconds[0], seconds[0]
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return low, high


def outcome_of(data: Mapping[str, Any]) -> Outcome:
    """Return the outcome that `to_dict` wrote.

    Raises:
        TypeError, ValueError: It did not write this.
    """
    return Outcome(**{**data, "seconds": tuple(float(each) for each in data["seconds"])})
