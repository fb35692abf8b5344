"""What a search came to, as plain values: computed once, then shown as a table, as JSON, as YAML or as a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

from fsdplaunch.config.schema.walk import Path as KeyPath
from fsdplaunch.tune.candidate import Candidate
from fsdplaunch.tune.rows import Duel, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one changed key gained.

    Attributes:
        path: The key.
        value: Its new value.
        share: Of a step's time that was saved with this change alone; below 0 for a loss, None where not known.
        makes_it_fit: Whether the configuration without changes does not fit, and with this change it does.
    """

    path: KeyPath
    value: Any
    share: float | None
    makes_it_fit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The end of a search.

    Attributes:
        script: As the user wrote it.
        config: The configuration's file, in words.
        folder: Of the search, with every trial's output.
        world: Workers.
        device: `cuda` or `cpu`.
        limit: Bytes that a rank may need; None where nothing limits it.
        rows: Every candidate.
        kept: The one to take; None when none fits.
        duels: The comparisons of the best.
        is_complete: Whether the search came to its end.
        seconds: Of all launches.
    """

    script: str
    config: str
    folder: Path
    world: int
    device: str
    limit: int | None
    rows: Sequence[Row]
    kept: Candidate | None
    duels: Sequence[Duel]
    is_complete: bool
    seconds: float

    @property
    def yours(self) -> Row:
        """Return the row of the user's own configuration."""
        return self.rows[0]

    def row(self, candidate: Candidate) -> Row:
        """Return a candidate's row."""
        return next(row for row in self.rows if row.candidate == candidate)

    @property
    def speed(self) -> float | None:
        """Return how many times faster the kept one is than yours, measured in turn; None where they were not."""
        duel = next((each for each in self.duels if self._is_with_yours(each)), None)
        if duel is None:
            return 1.0 if self.kept is not None and self.kept.is_yours else None
        ratio = exp(mean(log(second.median / first.median) for first, second in duel.rounds))
        return ratio if duel.first == self.kept else 1 / ratio

    def _is_with_yours(self, duel: Duel) -> bool:
        pair = (duel.first, duel.second)
        return bool(duel.rounds) and self.kept in pair and any(each.is_yours for each in pair)

    def gains(self) -> list[Gain]:
        """Return what each key that the kept candidate changes gained."""
        return [self._gain(path, value) for path, value in (self.kept.changes if self.kept else ())]

    def _gain(self, path: KeyPath, value: Any) -> Gain:
        with_it = [row for row in self.rows if (path, value) in row.candidate.changes and row.fastest is not None]
        alone = min(with_it, key=lambda row: len(row.candidate.changes), default=None)
        yours = self.yours.fastest
        share = None
        if alone is not None and alone.fastest is not None and yours is not None:
            share = 1 - alone.fastest.median / yours.median
        makes_it_fit = not self.yours.fits and alone is not None and alone.fits
        return Gain(path=path, value=value, share=share, makes_it_fit=makes_it_fit)

    def predictions(self) -> list[float]:
        """Return how far each prediction of memory was off: 0.1 where a run needed 10 % more than predicted."""
        return [
            row.fastest.memory / row.predicted - 1
            for row in self.rows
            if row.fastest is not None and row.predicted and row.fastest.memory
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data: seconds and bytes."""
        return {
            "script": self.script,
            "config": self.config,
            "folder": str(self.folder),
            "workers": self.world,
            "device": self.device,
            "memory_limit": self.limit,
            "complete": self.is_complete,
            "seconds": round(self.seconds, 1),
            "best": None if self.kept is None else self.kept.to_dict(),
            "speed": self.speed,
            "gains": [gain_data(gain) for gain in self.gains()],
            "candidates": [row_data(row) for row in self.rows],
            "comparisons": [duel_data(duel) for duel in self.duels],
            "estimate_off": self.predictions(),
        }  # fmt: skip


def gain_data(gain: Gain) -> dict[str, Any]:
    """Return what one key gained as plain data."""
    return {
        "key": ".".join(gain.path),
        "value": gain.value,
        "saves": gain.share,
        "makes_it_fit": gain.makes_it_fit,
    }


def row_data(row: Row) -> dict[str, Any]:
    """Return one candidate as plain data."""
    fastest = row.fastest
    low, high = fastest.quartiles if fastest else (None, None)
    return {
        "changes": row.candidate.to_dict(),
        "state": row.state,
        "reason": row.reason,
        "step_seconds": fastest.median if fastest else None,
        "step_quartiles": [low, high],
        "steps": len(fastest.seconds) if fastest else 0,
        "launches": len(row.outcomes),
        "samples_per_second": fastest.rows if fastest else None,
        "tokens_per_second": fastest.tokens if fastest else None,
        "memory": fastest.memory if fastest else None,
        "memory_predicted": row.predicted,
        "waiting": fastest.waiting if fastest else None,
    }


def duel_data(duel: Duel) -> dict[str, Any]:
    """Return one comparison as plain data."""
    return {
        "first": duel.first.to_dict(),
        "second": duel.second.to_dict(),
        "verdict": duel.verdict,
        "rounds": [[first.median, second.median] for first, second in duel.rounds],
    }
