"""What a search came to: in words, as plain data, and as a configuration."""

from collections.abc import Iterator, Sequence
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
from fsdplaunch.display_text import size_words, step_time, table
from fsdplaunch.errors import UsageError
from fsdplaunch.tune.search import Duel, Row
from fsdplaunch.tune.space import Candidate
from fsdplaunch.tune.trial import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The end of a search."""

    script: str  # as the user wrote it
    config: str  # the configuration's file, in words
    folder: Path  # of the search, with every trial's output
    world: int  # workers
    device: str  # `cuda` or `cpu`
    limit: int | None  # bytes that a rank may need; None where nothing limits it
    rows: Sequence[Row]  # every candidate, yours first
    kept: Candidate | None  # the one to take; None when none fits
    duels: Sequence[Duel]  # the comparisons of the best
    is_complete: bool  # whether the search came to its end
    seconds: float  # of all launches

    @property
    def speed(self) -> float | None:
        """Return how many times faster the kept one is than yours, measured in turn; None where they were not."""
        if self.kept is None or self.kept.is_yours:
            return None if self.kept is None else 1.0
        pair = {self.kept, Candidate()}
        duel = next((each for each in self.duels if each.rounds and {each.first, each.second} == pair), None)
        if duel is None:
            return None
        return 1 / _ratio(duel) if duel.first == self.kept else _ratio(duel)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data: seconds and bytes."""
        rows = [(row, row.fastest) for row in self.rows]
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
            "candidates": [
                {
                    "changes": row.candidate.to_dict(),
                    "state": row.state,
                    "reason": row.reason,
                    "step_seconds": fastest.median if fastest else None,
                    "step_quartiles": fastest.quartiles if fastest else (None, None),
                    "steps": len(fastest.seconds) if fastest else 0,
                    "launches": [round(outcome.wall, 2) for outcome in row.outcomes],
                    "memory": fastest.memory if fastest else None,
                }
                for row, fastest in rows
            ],
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


def _ratio(duel: Duel) -> float:
    """Return how many times as long the first takes, over all rounds."""
    return exp(mean(log(first.median / second.median) for first, second in duel.rounds))


def step_words(outcome: Outcome) -> str:
    """Return the time of a step, and between which times half of the steps lie."""
    low, high = outcome.quartiles
    return f"{step_time(outcome.median)} ({step_time(low)} to {step_time(high)})"


def _state(row: Row) -> str:
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
        cells.append((mark + row.candidate.label, step_words(fastest), memory, _state(row)))
    cells += [("  " + row.candidate.label, "", "", _state(row)) for row in result.rows if not row.fastest]
    yield from table(cells)
    yield ""
    for duel in result.duels:
        names = f"{duel.first.label} and {duel.second.label}"
        count = f"{len(duel.rounds)} round{'s' if len(duel.rounds) != 1 else ''} in turn"
        if duel.verdict in ("open", "equal"):
            said = "not decided after" if duel.verdict == "open" else "no difference in"
            yield f"{names}: {said} {count}"
            continue
        is_first = duel.verdict == "first"
        share = 1 - (_ratio(duel) if is_first else 1 / _ratio(duel))
        winner = duel.first if is_first else duel.second
        yield f"{names}: {winner.label} takes {100 * share:.0f} % less time, clear after {count}"
    kept, speed = result.kept, result.speed
    if kept is None:
        answer = "no candidate fits"
    elif kept.is_yours:
        answer = "yours is the one to keep: nothing tried is clearly faster"
    elif not result.rows[0].fits:
        answer = f"best of those that fit: {kept.label}; yours does not fit"
    elif speed is None:
        answer = f"best: {kept.label}; not compared directly with yours"
    else:
        answer = f"best: {kept.label}, {speed:.2f} times the speed of yours"
    yield answer if result.is_complete else f"so far, {answer}"


_HEAD = "# measured by fsdplaunch tune"
"""What our comment at the top of a file begins with."""


def winner_text(result: TuneResult, config: Config, loaded: LoadedConfig) -> str:
    """Return a file that says the kept candidate: the user's own, changed, or where that cannot be a new one."""
    body, keys = render(config), keys_by_path()
    if loaded.path is not None:
        lines = loaded.path.read_text(encoding="utf-8").splitlines(keepends=True)
        old = "".join(line for line in lines if not line.lstrip().startswith(_HEAD))
        # The candidate's keys, what follows them, and what options set.
        changed = [path for path, _ in result.kept.changes] if result.kept is not None else []
        tunables = [keys[path].key.tunable for path in changed]
        others = [path for path, origin in loaded.origins.items() if origin.layer in ("env", "flag")]
        others += [tuple(name.split(".")) for tunable in tunables if tunable for name in tunable.follow]
        wanted = dict.fromkeys([*changed, *(path for path in others if loaded.origins[path].layer != "default")])
        try:
            edited = set_keys(old, [(keys[path], value_at(config, path)) for path in wanted])
            if stack(read_text(edited, str(loaded.path))).config == config:
                body = edited
        except (UsageError, ConfigError):  # values shared through anchors: the text cannot be kept
            pass
    row = next((row for row in result.rows if row.candidate == result.kept), None)
    if row is None or row.fastest is None:
        return body
    head = f"{_HEAD} {result.script}: {step_time(row.fastest.median)} per step on {result.world} workers"
    if row.candidate.is_yours:
        head += ", unchanged: nothing tried is clearly faster"
    elif result.speed and result.rows[0].fits:
        head += f", {result.speed:.2f} times the speed before"
    return f"{head}\n{body.rstrip()}\n"
