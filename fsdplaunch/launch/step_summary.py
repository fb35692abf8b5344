"""What bounds a run's steps, and which rank is slow: from the records that its workers write. Pure, without torch.

In synchronous training all ranks' steps last alike, for the fast ones wait for the slow one. A rank's own time is
the rest of a step: what it did not spend waiting for others. The slow rank is the one with the most of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isnan
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from fsdplaunch.display_text import counted, size_words, step_time
from fsdplaunch.files import matches
from fsdplaunch.launch.remote_steps import NODE_STEPS, ROW, unpacked
from fsdplaunch.run_dir import rank_folder, read_json
from fsdplaunch.step_record import STEPS, RankSteps, Step, read_steps

_WINDOW_SECONDS = 10.0
_FEWEST, _ENOUGH = 20, 10
"""Steps: that are looked at even where they took longer than the window, and below which nothing is concluded."""
_SLOWER, _SLOWER_SECONDS = 0.15, 0.001
"""By how much a slow rank's own time exceeds the next one's, of that and absolute."""
_OF_STEP = 0.1
"""Part of a step that has to be lost by a slow rank: else nobody waits for it."""
_MOSTLY = 0.75
"""Part of the steps in which a slow rank is the slowest."""
_LARGE = 1 / 3
"""Part of a step from which waiting for data, or for the network, bounds it."""
_FULL = 0.95
"""Part of the memory from which it is the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """Medians of one rank's last steps; None where something is not known."""

    rank: int
    step: int  # how many it has made
    step_seconds: float | None
    quartiles: tuple[float, float] | None  # of the step's seconds
    data_seconds: float | None
    peer_seconds: float | None
    memory_bytes: int | None  # after the last step
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """The rank that all others wait for."""

    rank: int
    cause: str  # `input` or `compute`
    factor: float | None  # its own time by that of the others; None where they have none


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run's ranks do, by their last steps."""

    step: int  # that all ranks have made
    steps_total: int | None  # that the run makes, where its Trainer says so
    step_seconds: float | None  # median
    steps_per_second: float | None  # of that median
    samples_per_second: float | None  # over all ranks
    tokens_per_second: float | None
    bound_by: str | None  # input, straggler, communication, compute or memory; None with too few steps
    slowest: SlowRank | None
    memory_limit: int | None  # bytes of the smallest GPU
    ranks: Sequence[RankSummary]

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        slowest = self.slowest
        names = ("rank", "step", "step_seconds", "data_seconds", "peer_seconds", "memory_bytes", "peak_bytes")
        own = [each.name for each in fields(self) if each.name not in ("slowest", "ranks")]
        return {
            **{name: getattr(self, name) for name in own},
            "slowest": slowest and {"rank": slowest.rank, "cause": slowest.cause, "factor": slowest.factor},
            "ranks": [{name: getattr(one, name) for name in names} for one in self.ranks],
        }


def read_ranks(run_dir: Path) -> dict[int, RankSteps]:
    """Read what the ranks of a run have written, by rank: of all nodes whose folders can be seen here."""
    found: dict[int, RankSteps] = {}
    for node in (run_dir, *run_dir.glob("node[0-9]*")):
        if isinstance(rows := read_json(node / NODE_STEPS).get("ranks"), list) and matches(rows, [ROW]):
            found |= unpacked(rows)  # of a node that shares no folder with this one
        for file in node.glob(str(rank_folder(Path(), "[0-9]*") / STEPS)):
            steps = read_steps(file.parent)
            if steps is not None and file.parent.name.isdecimal():
                found[int(file.parent.name)] = steps
    return dict(sorted(found.items()))


def summarize(ranks: Mapping[int, RankSteps]) -> Summary:
    """Say what the last steps of a run took, what bounds them, and who is slow."""
    last = {rank: _last_steps(steps.recent) for rank, steps in ranks.items()}
    rows = [_summarize_rank(rank, ranks[rank].made, last[rank]) for rank in sorted(ranks)]
    known = [row.step_seconds for row in rows if row.step_seconds is not None]
    seconds = median(known) if known else None
    slowest = _slow_rank(last) if len(last) > 1 else None
    limit = min((steps.memory_limit for steps in ranks.values() if steps.memory_limit), default=None)
    return Summary(
        step=min((row.step for row in rows), default=0),
        steps_total=max((steps.total for steps in ranks.values()), default=0) or None,
        step_seconds=seconds,
        steps_per_second=1 / seconds if seconds else None,
        samples_per_second=_rate(last, seconds, lambda step: step.samples),
        tokens_per_second=_rate(last, seconds, lambda step: step.tokens),
        bound_by=_bound(ranks, last, rows, slowest),
        slowest=slowest,
        memory_limit=limit,
        ranks=rows,
    )


def _last_steps(steps: Sequence[Step]) -> list[Step]:
    """Return the last steps whose time is known: the first one's, with all that came before it, is not."""
    timed = [step for step in steps if not isnan(step.seconds)]
    recent = [step for step in timed if step.ended > timed[-1].ended - _WINDOW_SECONDS]
    return recent if len(recent) > _FEWEST else timed[-_FEWEST:]


def _summarize_rank(rank: int, made: int, steps: Sequence[Step]) -> RankSummary:
    seconds = [step.seconds for step in steps]
    quarters = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    memory = _known([steps[-1].memory_bytes]) if steps else []
    peak = _known([step.peak_bytes for step in steps])
    return RankSummary(
        rank=rank,
        step=made,
        step_seconds=_median(seconds),
        quartiles=(quarters[0], quarters[2]) if quarters else None,
        data_seconds=_median([step.data_seconds for step in steps]),
        peer_seconds=_median([step.peer_seconds for step in steps]),
        memory_bytes=int(memory[0]) if memory else None,
        peak_bytes=int(max(peak)) if peak else None,
    )


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not isnan(value)]


def _median(values: Sequence[float]) -> float | None:
    known = _known(values)
    return median(known) if known else None


def _rate(
    last: Mapping[int, Sequence[Step]], seconds: float | None, amount: Callable[[Step], float]
) -> float | None:
    """Return how much of something all ranks do in a second, by the median step; None where a rank cannot tell."""
    means = [fmean(known) for steps in last.values() if (known := _known([amount(step) for step in steps]))]
    return sum(means) / seconds if seconds and means and len(means) == len(last) else None


def _slow_rank(last: Mapping[int, Sequence[Step]]) -> SlowRank | None:
    """Return the rank whose own time is clearly the largest, step by step; None where none is."""
    by_number = [{int(step.number): step for step in steps} for steps in last.values()]
    numbers = sorted(set.intersection(*map(set, by_number)))
    if len(numbers) < _ENOUGH:
        return None
    steps = [[known[number] for number in numbers] for known in by_number]
    peers_known = not any(isnan(step.peer_seconds) for column in steps for step in column)
    data = [[0.0 if isnan(step.data_seconds) else step.data_seconds for step in column] for column in steps]
    # Where nobody can tell how long it waited for others, what it waited for data is at least its own.
    own = [[step.seconds - step.peer_seconds for step in column] for column in steps] if peers_known else data
    medians = [median(column) for column in own]
    slow = max(range(len(medians)), key=medians.__getitem__)
    others = [each for place, each in enumerate(medians) if place != slow]
    usual, lost = median(others), medians[slow] - max(others)
    most = sum(times[slow] == max(times) for times in zip(*own, strict=True))
    length = median(step.seconds for step in steps[slow])
    if lost < max(_SLOWER * max(others), _SLOWER_SECONDS, _OF_STEP * length) or most < _MOSTLY * len(numbers):
        return None
    more_data = median(data[slow]) - median(median(column) for at, column in enumerate(data) if at != slow)
    cause = "input" if more_data > (medians[slow] - usual) / 2 else "compute"
    return SlowRank(rank=list(last)[slow], cause=cause, factor=medians[slow] / usual if usual > 0 else None)


def _bound(
    ranks: Mapping[int, RankSteps],
    last: Mapping[int, Sequence[Step]],
    rows: Sequence[RankSummary],
    slowest: SlowRank | None,
) -> str | None:
    if min(map(len, last.values()), default=0) < _ENOUGH:
        return None
    if slowest is not None:
        return "straggler"
    parts = _parts_lost(rows)
    largest = max(parts, key=parts.__getitem__)
    if parts[largest] >= _LARGE:
        return largest
    nearly_full = any(0 < _FULL * ranks[row.rank].memory_limit <= (row.peak_bytes or 0) for row in rows)
    return "memory" if nearly_full else "compute"


def _parts_lost(rows: Sequence[RankSummary]) -> dict[str, float]:
    """Return the parts of a step that go to the input and to the network."""
    # What even the last one to come to the collectives spends in them is the network's.
    return {
        "input": fmean(waiting_parts(rows, "data") or [0.0]),
        "communication": min(waiting_parts(rows, "peer"), default=0.0),
    }


def speed_words(found: Summary) -> list[str]:
    """Return how far a run is, and how fast."""
    if found.step_seconds is None:
        return [f"step {found.step}" if found.ranks else "no rank has made a step yet"]
    rates = {name: getattr(found, f"{name}_per_second") for name in ("steps", "samples", "tokens")}
    of_all = f" of {found.steps_total}" if found.steps_total else ""
    words = [f"step {found.step}{of_all}", f"{step_time(found.step_seconds)} a step"]
    digits = ((f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}", name) for name, rate in rates.items() if rate)  # noqa: PLR2004
    return words + [f"{text} {name}/s" for text, name in digits]


def waiting_words(found: Summary) -> list[str]:
    """Return which part of a step ranks wait, and for what, in the mean."""
    parts = {"data": waiting_parts(found.ranks, "data"), "others": waiting_parts(found.ranks, "peer")}
    return [f"{100 * fmean(part):.0f} % waiting for {what}" for what, part in parts.items() if part]


def waiting_parts(rows: Sequence[RankSummary], name: str) -> list[float]:
    """Return the part of each rank's step that it waits for `data` or a `peer`, where it is known."""
    known = [(getattr(row, f"{name}_seconds"), row.step_seconds) for row in rows]
    return [waited / seconds for waited, seconds in known if waited is not None and seconds]


def bound_words(found: Summary) -> str:
    """Say in one sentence what bounds the step."""
    slow = found.slowest
    if slow is not None:
        by = (
            f"{slow.factor:.1f} times the others' own time"
            if slow.factor is not None
            else "the others take next to none of their own"
        )
        return f"rank {slow.rank} is slow ({slow.cause}): {by}, and they wait for it"
    percents = {name: f"{100 * part:.0f} %" for name, part in _parts_lost(found.ranks).items()}
    sentences = {
        "input": f"the step is input-bound: ranks wait {percents['input']} of it for the next batch",
        "communication": f"the step is communication-bound: {percents['communication']} or more on each rank",
        "memory": "the step is compute-bound, and the memory is nearly full",
        "compute": "the step is compute-bound",
    }
    return sentences.get(found.bound_by or "", "too few steps yet to say what bounds them")


def end_lines(found: Summary) -> list[str]:
    """Return what is to be said of a run's last steps when it has ended; nothing where none was measured.

    Of what bounds them only what wants to be changed: a slow rank, or memory that is nearly full.
    """
    if found.step_seconds is None:
        return []
    speed = [counted(found.step, "step"), *speed_words(found)[1:]]
    lines = [", ".join(speed), ", ".join(waiting_words(found))]
    peaks = [row.peak_bytes for row in found.ranks if row.peak_bytes is not None]
    if peaks:
        least, most = size_words(min(peaks)), size_words(max(peaks))
        lines.append(f"memory {most if least == most else f'{least} to {most}'} at most, on each rank")
    return lines + ([bound_words(found)] if found.bound_by in ("straggler", "memory") else [])
