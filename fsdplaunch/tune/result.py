"""What a search came to: in words, as plain data, and as a configuration."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

from fsdplaunch.config.load import LoadedConfig, stack
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.render import render, set_keys
from fsdplaunch.config.schema.config import Config, keys_by_path, value_at
from fsdplaunch.config.yaml_text import read_text
from fsdplaunch.display_text import size_words
from fsdplaunch.errors import UsageError
from fsdplaunch.tune.search import Duel, Row
from fsdplaunch.tune.space import Candidate
from fsdplaunch.tune.trial import Outcome


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
        rows: Every candidate, yours first.
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
    def speed(self) -> float | None:
        """Return how many times faster the kept one is than yours, measured in turn; None where they were not."""
        if self.kept is None or self.kept.is_yours:
            return None if self.kept is None else 1.0
        pair = {self.kept, Candidate()}
        duel = next((each for each in self.duels if each.rounds and {each.first, each.second} == pair), None)
        if duel is None:
            return None
        ratio = exp(mean(log(second.median / first.median) for first, second in duel.rounds))
        return ratio if duel.first == self.kept else 1 / ratio

    def gains(self) -> Iterator[dict[str, Any]]:
        """Yield what each key that the kept candidate changes gained: the share of a step's time that it saves.

        The share is None where the key was not measured without the others.
        """
        changes, yours = self.kept.changes if self.kept else (), self.rows[0]
        for path, value in changes:
            having = [row for row in self.rows if (path, value) in row.candidate.changes and row.fastest]
            alone = min(having, key=lambda row: len(row.candidate.changes), default=None)
            share = None
            if len(changes) == 1 and self.speed:  # as said of the whole
                share = 1 - 1 / self.speed
            elif alone is not None and alone.fastest and yours.fastest:
                share = 1 - alone.fastest.median / yours.fastest.median
            fits = not yours.fits and alone is not None and alone.fits
            yield {"key": ".".join(path), "value": value, "saves": share, "makes_it_fit": fits}

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
            "gains": list(self.gains()),
            "candidates": [_row_data(row) for row in self.rows],
            "comparisons": [
                {
                    "first": duel.first.to_dict(),
                    "second": duel.second.to_dict(),
                    "verdict": duel.verdict,
                    "rounds": [[first.median, second.median] for first, second in duel.rounds],
                }
                for duel in self.duels
            ],
        }


def _row_data(row: Row) -> dict[str, Any]:
    fastest = row.fastest
    return {
        "changes": row.candidate.to_dict(),
        "state": row.state,
        "reason": row.reason,
        "step_seconds": fastest.median if fastest else None,
        "step_quartiles": fastest.quartiles if fastest else (None, None),
        "steps": len(fastest.seconds) if fastest else 0,
        "launches": [round(outcome.wall, 2) for outcome in row.outcomes],
        "memory": fastest.memory if fastest else None,
    }


def step_words(outcome: Outcome) -> str:
    """Return the time of a step, and between which times half of the steps lie."""
    low, high = outcome.quartiles
    return f"{_seconds(outcome.median)} ({_seconds(low)} to {_seconds(high)})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def state_words(row: Row) -> str:
    """Return what became of a candidate that was not measured, or is not the one to take."""
    if row.state == "measured":
        return ""
    return row.reason if row.state == "same run" else f"{row.state}: {row.reason}" if row.reason else row.state


def table_lines(result: TuneResult) -> Iterator[str]:
    """Yield a line per candidate, the measured ones by the time of their steps, and what the search came to."""
    found = [(row.fastest, row) for row in result.rows if row.fastest is not None]
    limit = f" of {size_words(result.limit)}" if result.limit else ""
    cells = [("", "step (half of them)", "memory", "")]
    for fastest, row in sorted(found, key=lambda pair: pair[0].median):
        mark = "* " if row.candidate == result.kept else "  "
        memory = size_words(fastest.memory) + limit
        cells.append((mark + row.candidate.label, step_words(fastest), memory, state_words(row)))
    cells += [("  " + row.candidate.label, "", "", state_words(row)) for row in result.rows if not row.fastest]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    yield ""
    yield from map(_duel_words, result.duels)
    yield from _answer(result)
    yield from (f"  {_gain_words(gain)}" for gain in result.gains())


def _answer(result: TuneResult) -> Iterator[str]:
    kept, speed = result.kept, result.speed
    until = "" if result.is_complete else "so far, "
    if kept is None:
        yield f"{until}no candidate fits"
    elif kept.is_yours:
        yield f"{until}yours is the one to keep: nothing tried is clearly faster"
    elif not result.rows[0].fits:
        yield f"{until}best of those that fit: {kept.label}; yours does not fit"
    elif speed is None:
        yield f"{until}best: {kept.label}; not measured against yours in turn"
    else:
        yield f"{until}best: {kept.label}, {speed:.2f} times the speed of yours"


def _duel_words(duel: Duel) -> str:
    names = f"{duel.first.label} and {duel.second.label}"
    count = f"{len(duel.rounds)} round{'s' if len(duel.rounds) != 1 else ''} in turn"
    if duel.verdict == "open":
        return f"{names}: not decided after {count}"
    if duel.verdict == "equal":
        return f"{names}: no difference in {count}"
    ratio = exp(mean(log(first.median / second.median) for first, second in duel.rounds))
    share = 1 - (ratio if duel.verdict == "first" else 1 / ratio)
    winner = duel.first if duel.verdict == "first" else duel.second
    return f"{names}: {winner.label} takes {100 * share:.0f} % less time, clear after {count}"


def _gain_words(gain: Mapping[str, Any]) -> str:
    value = str(gain["value"]).lower() if isinstance(gain["value"], bool) else gain["value"]
    name, share = f"{gain['key']}: {value}", gain["saves"]
    if gain["makes_it_fit"]:
        return f"{name}  makes it fit"
    if share is None:
        return f"{name}  was measured together with the others only"
    return f"{name}  {100 * abs(share):.0f} % {'less' if share >= 0 else 'more'} time per step by itself"


_HEAD, _REMARK = "# measured by fsdplaunch tune", "# tune:"
"""What our comments at the top of a file begin with."""


def winner_text(result: TuneResult, config: Config, loaded: LoadedConfig) -> str:
    """Return the text of a file that says the kept candidate: the user's own changed, or where not, a new one.

    Args:
        result: With a kept candidate.
        config: The candidate's, resolved.
        loaded: The user's configuration.
    """
    body = render(config)
    if loaded.path is not None:
        lines = loaded.path.read_text(encoding="utf-8").splitlines(keepends=True)
        old = "".join(line for line in lines if not line.lstrip().startswith((_HEAD, _REMARK)))
        try:
            edited = set_keys(old, _changes(result, config, loaded))
            if stack(read_text(edited, str(loaded.path))).config == config:
                body = edited
        except (UsageError, ConfigError):  # values shared through anchors: the text cannot be kept
            pass
    return "\n".join([*_head(result), *body.splitlines()]) + "\n"


def _changes(result: TuneResult, config: Config, loaded: LoadedConfig) -> list[tuple[Any, Any]]:
    """Return what has to change in the user's file: the candidate's keys, what follows them, what options set."""
    keys = keys_by_path()
    changed = dict(result.kept.changes) if result.kept is not None else {}
    tunables = [keys[path].key.tunable for path in changed]
    follow = [tuple(name.split(".")) for tunable in tunables if tunable is not None for name in tunable.follow]
    given = [path for path, origin in loaded.origins.items() if origin.layer in ("env", "flag")]
    others = [
        path for path in (*given, *follow) if path not in changed and loaded.origins[path].layer != "default"
    ]
    return [(keys[path], value_at(config, path)) for path in dict.fromkeys((*changed, *others))]


def _head(result: TuneResult) -> Iterator[str]:
    row = next((row for row in result.rows if row.candidate == result.kept), None)
    if row is None or row.fastest is None:
        return
    words = f"{_HEAD} {result.script}: {_seconds(row.fastest.median)} per step on {result.world} workers"
    if row.candidate.is_yours:
        words += ", unchanged: nothing tried is clearly faster"
    elif result.speed and result.rows[0].fits:
        words += f", {result.speed:.2f} times the speed before"
    yield words
    yield from (f"{_REMARK} {_gain_words(gain)}" for gain in result.gains())
