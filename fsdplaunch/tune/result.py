"""The result of a search: what is kept, in words, in a file to resume from, and as a configuration."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

from fsdplaunch.config.render import render, set_keys
from fsdplaunch.config.schema.config import Config, KeyPath, KeySpec
from fsdplaunch.display_text import size_words
from fsdplaunch.errors import UsageError
from fsdplaunch.run_dir import PRIVATE_MODE, read_json, write_json
from fsdplaunch.tune.search import Duel, Row, SearchStopped
from fsdplaunch.tune.space import Candidate
from fsdplaunch.tune.trial import Outcome, outcome_of


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
        "memory": fastest.memory if fastest else None,
    }


def duel_data(duel: Duel) -> dict[str, Any]:
    """Return one comparison as plain data."""
    return {
        "first": duel.first.to_dict(),
        "second": duel.second.to_dict(),
        "verdict": duel.verdict,
        "rounds": [[first.median, second.median] for first, second in duel.rounds],
    }


STATE = "tune.json"
SUFFIX = "-tune"
"""What the name of a search's folder ends with."""


@dataclass(slots=True, kw_only=True)
class TuneState:
    """A search on disk.

    Attributes:
        folder: Of the search.
        request: What was asked: script, arguments, options, as plain data.
        outcomes: Changes, steps and outcome of each launch, in order.
    """

    folder: Path
    request: Mapping[str, Any]
    outcomes: list[tuple[Mapping[str, Any], int, Outcome]] = field(default_factory=list)

    def write(self) -> None:
        """Write it, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        outcomes = [
            {"changes": changes, "steps": steps, "outcome": outcome.to_dict()}
            for changes, steps, outcome in self.outcomes
        ]
        write_json(self.folder / STATE, {"request": self.request, "outcomes": outcomes}, mode=PRIVATE_MODE)

    def trial(self, launch: Callable[[Candidate, int, int], Outcome]) -> Callable[[Candidate, int], Outcome]:
        """Return what gives the outcomes that are known, one after the other, and launches for the next ones.

        Args:
            launch: Takes the candidate, the number of the launch and the steps.
        """
        at = 0

        def run(candidate: Candidate, steps: int) -> Outcome:
            nonlocal at
            known = self.outcomes[at] if at < len(self.outcomes) else None
            at += 1
            if known is not None and known[:2] == (candidate.to_dict(), steps):
                return known[2]
            del self.outcomes[at - 1 :]  # what came after belongs to another course
            outcome = launch(candidate, at, steps)
            if outcome.kind == "stopped":
                raise SearchStopped(outcome.failure)
            self.outcomes.append((candidate.to_dict(), steps, outcome))
            self.write()
            return outcome

        return run


def find_state(name: str, log_dir: Path) -> TuneState:
    """Return the search of a folder, or of a name in the folder of the runs.

    Args:
        name: `--resume`'s value: a path, a name, its beginning, or its end before `-tune`.
        log_dir: Where runs are.

    Raises:
        UsageError: There is none, more than one, or its file is broken.
    """
    given = Path(name)
    folders = [given] if (given / STATE).is_file() else []
    if not folders and log_dir.is_dir():
        all_of_them = [path for path in log_dir.iterdir() if (path / STATE).is_file()]
        folders = [
            path for path in all_of_them if path.name.startswith(name) or path.name.endswith((name, name + SUFFIX))
        ]
    if len(folders) != 1:
        count = f"{len(folders)} searches" if folders else "no search"
        msg = f"--resume {name}: {count} by this name"
        raise UsageError(msg, hint=f"name the folder of one, {log_dir}/...{SUFFIX}")
    return _read(folders[0].absolute())


def _read(folder: Path) -> TuneState:
    data = read_json(folder / STATE)
    try:
        outcomes: list[tuple[Mapping[str, Any], int, Outcome]] = [
            (dict(one["changes"]), int(one["steps"]), outcome_of(one["outcome"])) for one in data["outcomes"]
        ]
        return TuneState(folder=folder, request=dict(data["request"]), outcomes=outcomes)
    except (KeyError, TypeError, ValueError) as error:
        raise broken_state(folder) from error


def broken_state(folder: Path) -> UsageError:
    """Return the error for a search whose file cannot be read."""
    msg = f"{folder / STATE} is not the file of a search"
    return UsageError(msg, hint="start again without --resume")


_BAR = 16
_LONGEST = 60
_SECOND = 1.0


def table_lines(
    rows: Sequence[Row], *, limit: int | None = None, kept: Candidate | None = None, progress: str = ""
) -> list[str]:
    """Return a head and a line per candidate, measured ones by their speed, the others after them.

    Args:
        rows: The candidates.
        limit: Bytes that a rank may need; None where nothing limits it.
        kept: The one to take, which gets a mark.
        progress: What the running one is doing.
    """
    measured = sorted(((row.fastest, row) for row in rows if row.fastest), key=lambda pair: pair[0].median)
    slowest = max((fastest.median for fastest, _ in measured), default=0.0)
    cells = [_cells(row, fastest, slowest, limit) for fastest, row in measured]
    head = ("step", "half of them", "", "memory", "")
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    names = max((len(_name(row)) for row in rows), default=0)
    lines = [_line(" " * (names + 2), head, widths)] if cells else []
    for (_, row), own in zip(measured, cells, strict=True):
        mark = "* " if row.candidate == kept else "  "
        state = progress if row.state == "running" else own[-1]
        lines.append(_line(f"{mark}{_name(row):<{names}}", [*own[:-1], state], widths))
    for row in (row for row in rows if not row.fastest):
        state = progress or "running" if row.state == "running" else _state(row)
        lines.append(f"  {_name(row):<{names}}  {state}".rstrip())
    return lines


def _name(row: Row) -> str:
    label = row.candidate.label
    return label if len(label) <= _LONGEST else label[: _LONGEST - 3] + "..."


def _state(row: Row) -> str:
    if row.state == "same run":
        return row.reason
    return f"{row.state}: {row.reason}" if row.reason else row.state


def _line(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    step, half, bar, memory, state = cells
    numbers = f"{step:>{widths[0]}}  {half:>{widths[1]}}  {bar:<{widths[2]}}  {memory:>{widths[3]}}"
    return f"{name}  {numbers}  {state}".rstrip()


def _cells(row: Row, fastest: Outcome, slowest: float, limit: int | None) -> list[str]:
    low, high = fastest.quartiles
    return [
        step_words(fastest.median),
        f"{step_words(low)} to {step_words(high)}",
        "#" * max(1, round(_BAR * fastest.median / slowest)),
        size_words(fastest.memory) + (f" of {size_words(limit)}" if limit else ""),
        "" if row.state == "measured" else _state(row),
    ]


def step_words(seconds: float) -> str:
    """Return the time of a step: `12.3 ms` or `1.23 s`."""
    return f"{seconds:.2f} s" if seconds >= _SECOND else f"{1000 * seconds:.1f} ms"


def closing_lines(result: TuneResult) -> Iterator[str]:
    """Yield what the search came to, after its table."""
    for duel in result.duels:
        yield duel_words(duel)
    yield from _answer(result)
    for gain in result.gains():
        yield f"  {gain_words(gain)}"


def _answer(result: TuneResult) -> Iterator[str]:
    kept, speed = result.kept, result.speed
    until = "" if result.is_complete else "so far, "
    if kept is None:
        yield f"{until}no candidate fits"
    elif kept.is_yours:
        yield f"{until}yours is the one to keep: nothing tried is clearly faster"
    elif not result.yours.fits:
        yield f"{until}best of those that fit: {kept.label}; yours does not fit"
    elif speed is None:
        yield f"{until}best: {kept.label}; not measured against yours in turn"
    else:
        yield f"{until}best: {kept.label}, {speed:.2f} times the speed of yours"


def duel_words(duel: Duel) -> str:
    """Return one comparison in words."""
    names = f"{duel.first.label} and {duel.second.label}"
    count = f"{len(duel.rounds)} round{'s' if len(duel.rounds) != 1 else ''} in turn"
    if duel.verdict == "open":
        return f"{names}: not decided after {count}"
    if duel.verdict == "equal":
        return f"{names}: no difference in {count}"
    fast, slow = (0, 1) if duel.verdict == "first" else (1, 0)
    pairs = duel.rounds
    share = sum(1 - pair[fast].median / pair[slow].median for pair in pairs) / len(pairs)
    winner = duel.first if duel.verdict == "first" else duel.second
    return f"{names}: {winner.label} takes {100 * share:.0f} % less time, clear after {count}"


def gain_words(gain: Gain) -> str:
    """Return what a changed key gained."""
    name = ".".join(gain.path)
    value = str(gain.value).lower() if isinstance(gain.value, bool) else gain.value
    if gain.makes_it_fit:
        return f"{name}: {value}  makes it fit"
    if gain.share is None:
        return f"{name}: {value}  was measured together with the others only"
    more_or_less = "less" if gain.share >= 0 else "more"
    return f"{name}: {value}  {100 * abs(gain.share):.0f} % {more_or_less} time per step by itself"


_HEAD, _REMARK = "# measured by fsdplaunch tune", "# tune:"
"""What our comments at the top of a file begin with."""


def winner_text(
    result: TuneResult, config: Config, *, old: str | None, changes: Sequence[tuple[KeySpec, object]]
) -> str:
    """Return the text of a file that says the kept candidate.

    Args:
        result: With a kept candidate.
        config: The candidate's, resolved.
        old: The text of the user's file, whose comments and layout stay; None where there is none.
        changes: What has to change in it; None as a value takes a key out.
    """
    text = render(config)
    if old is not None:
        try:
            text = set_keys(_without_remarks(old), list(changes))
        except UsageError:  # values shared through anchors: the text cannot be kept
            text = render(config)
    return "\n".join([*_head(result), *text.splitlines()]) + "\n"


def _without_remarks(text: str) -> str:
    """Return a file's text without what an earlier search wrote about its measurements."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.lstrip().startswith((_HEAD, _REMARK)))


def _head(result: TuneResult) -> Iterator[str]:
    fastest = result.row(result.kept).fastest if result.kept is not None else None
    if fastest is None:
        return
    speed = f", {result.speed:.2f} times the speed before" if result.speed and result.yours.fits else ""
    words = f"{result.script}: {step_words(fastest.median)} per step on {result.world} workers{speed}"
    yield f"{_HEAD} {words}"
    yield from (f"{_REMARK} {gain_words(gain)}" for gain in result.gains())
