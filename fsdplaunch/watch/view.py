"""What a look at a run shows: the lines of a screen, one line for a log, a sentence on what bounds the step."""

import textwrap
from collections.abc import Callable, Sequence
from statistics import fmean

from fsdplaunch.display_text import GIB, one_line, step_time, table
from fsdplaunch.launch.run_result import duration
from fsdplaunch.launch.step_summary import (
    RankSummary,
    bound_words,
    speed_words,
    waiting_parts,
    waiting_words,
)
from fsdplaunch.watch import Snapshot

Line = tuple[str, str]
"""The text of a line, and its style as rich names it."""
_BLOCKS = " ▁▂▃▄▅▆▇█"
_CHART_LINES, _NARROWEST, _ROOMY = 3, 20, 16
"""Lines of the chart, columns that it needs, and lines of a screen that has room for it."""
_DROPPED = ("spread", "GPU", "memory", "others", "data")
"""Columns in the order in which a narrow screen goes without them."""


def screen(look: Snapshot, width: int, height: int, print_of: Callable[[int], str] | None = None) -> list[Line]:
    """Return the lines of a screen; with `print_of`, what each rank printed last in place of its numbers."""
    state, slow = state_words(look), look.summary.slowest
    name = fit(f"{one_line(look.run.script)}  {one_line(look.run.id)}", width - len(state) - 2)
    lines = [
        (f"{name}{state:>{max(0, width - len(name))}}", "bold"),
        (_as_many(speed_words(look.summary), width), ""),
    ]
    lines += [(line, "yellow" if slow else "") for line in textwrap.wrap(bound_words(look.summary), width)]
    chart = _chart(look, width) if height >= _ROOMY else []
    lines += [("", ""), *((line, "cyan") for line in chart), ("", "")] if chart else []
    rows = sorted(look.summary.ranks, key=lambda row: (slow is None or row.rank != slow.rank, -_own_seconds(row)))
    room = max(1, height - len(lines) - 1)
    shown = sorted(rows, key=lambda row: row.rank) if len(rows) <= room else rows[: room - 1]
    if print_of is not None:
        texts = [f"{row.rank:>5}  {one_line(print_of(row.rank))}"[:width] for row in shown]
        head = " rank  printed last"
    else:
        head, *texts = _fitting(rank_cells(look, shown), width)
    styles = ["yellow" if slow is not None and row.rank == slow.rank else "" for row in shown]
    lines += [(head, "dim"), *zip(texts, styles, strict=True)]
    if len(shown) < len(rows):
        lines.append(
            (fit(f"{len(rows) - len(shown)} of {len(rows)} ranks not shown: none is slower", width), "dim")
        )
    return lines


def log_line(look: Snapshot) -> str:
    """Return all of it in one line."""
    found = look.summary
    peak = max((row.peak_bytes or 0 for row in found.ranks), default=0)
    memory = [f"memory up to {peak / GIB:.1f} GiB"] if peak else []
    words = [state_words(look), *speed_words(found), *waiting_words(found), *memory]
    return f"{', '.join(words)}; {bound_words(found)}"


def state_words(look: Snapshot) -> str:
    """Return how the run is doing, and for how long."""
    seconds, left = look.run.seconds, look.seconds_left
    words = [one_line(look.run.state), *([duration(seconds)] if seconds is not None else [])]
    return ", ".join([*words, *([f"about {duration(left)} left"] if left is not None else [])])


def rank_cells(look: Snapshot, rows: Sequence[RankSummary]) -> list[list[str]]:
    """Return a table of ranks, its head first, with the columns that have something to say."""
    slow, cells = look.summary.slowest, []
    for row in rows:
        use, low_high, memory = look.gpus.get(row.rank), row.quartiles, row.memory_bytes
        limit = look.ranks[row.rank].memory_limit
        of_gpu = ((use.percent, " %"), (use.celsius, " C")) if use is not None else ()
        cells.append(
            {
                "rank": f"{'>' if slow is not None and slow.rank == row.rank else ''}{row.rank}",
                "step": str(row.step),
                "time": step_time(row.step_seconds) if row.step_seconds is not None else "",
                "spread": f"±{step_time((low_high[1] - low_high[0]) / 2)}" if low_high is not None else "",
                "data": "".join(f"{100 * part:.0f} %" for part in waiting_parts([row], "data")),
                "others": "".join(f"{100 * part:.0f} %" for part in waiting_parts([row], "peer")),
                "memory": f"{memory / GIB:.1f}{f'/{limit / GIB:.1f}' if limit else ''} GiB" if memory else "",
                "GPU": " ".join(f"{value}{unit}" for value, unit in of_gpu if value is not None),
            }
        )
    names = [name for name in (cells[0] if cells else ("rank",)) if any(row[name] for row in cells)]
    return [names, *([row[name] for name in names] for row in cells)]


def fit(text: str, width: int) -> str:
    """Return a text, or its end where it is too long."""
    return text if len(text) <= width else f"...{text[len(text) - max(0, width - 3) :]}"[: max(0, width)]


def _own_seconds(row: RankSummary) -> float:
    """Return what of a rank's step is its own: not spent waiting for others."""
    return (row.step_seconds or 0.0) - (row.peer_seconds or 0.0)


def _as_many(words: Sequence[str], width: int) -> str:
    """Return as many of the words as fit into a line."""
    line = words[0]
    for word in words[1:]:
        line = f"{line}  {word}" if len(line) + len(word) + 2 <= width else line
    return fit(line, width)


def _fitting(rows: list[list[str]], width: int) -> list[str]:
    """Return a table's lines, without the columns that there is no room for."""
    for dropped in _DROPPED:
        if max(map(len, table(rows, str.rjust))) > width:
            kept = [place for place, name in enumerate(rows[0]) if name != dropped]
            rows = [[row[place] for place in kept] for row in rows]
    return [fit(line, width) for line in table(rows, str.rjust)]


def _chart(look: Snapshot, width: int) -> list[str]:
    """Draw the time of a step over the whole run, from 0 to the longest."""
    parts = next((steps.history for steps in look.ranks.values()), ())  # of the first rank: all ranks' last alike
    seconds = [part.seconds for part in parts if part.seconds > 0]
    labels = [step_time(max(seconds, default=0.0)), *[""] * (_CHART_LINES - 2), "0"]
    room, levels = width - max(map(len, labels)) - 1, len(_BLOCKS) - 1
    if len(seconds) < 2 or room < _NARROWEST:  # noqa: PLR2004
        return []
    count = min(room, len(seconds))
    bins = [seconds[len(seconds) * k // count : len(seconds) * (k + 1) // count] for k in range(count)]
    heights = [round(fmean(values) / max(seconds) * _CHART_LINES * levels) for values in bins]
    lines = []
    for place, label in enumerate(labels):
        below = (_CHART_LINES - 1 - place) * levels
        bars = "".join(_BLOCKS[min(max(one - below, 0), levels)] for one in heights)
        lines.append(f"{bars:<{room}} {label}".rstrip())
    return lines
