"""The candidates as lines of text, while the search goes on and at its end. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from fsdplaunch.byte_sizes import size_words
from fsdplaunch.tune.candidate import Candidate
from fsdplaunch.tune.outcome import Outcome
from fsdplaunch.tune.result import Gain, TuneResult
from fsdplaunch.tune.rows import Duel, Row

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
    measured = sorted((row for row in rows if row.fastest), key=_order)
    others = [row for row in rows if not row.fastest]
    slowest = max((row.fastest.median for row in measured if row.fastest), default=0.0)
    rates = {name for row in measured if row.fastest for name in ("tokens", "rows") if getattr(row.fastest, name)}
    rate = "tokens" if "tokens" in rates else "rows" if rates else ""
    cells = [_cells(row, row.fastest, slowest, rate, limit) for row in measured if row.fastest]
    head = ["", "step", "half of them", "", f"{'samples' if rate == 'rows' else rate}/s" if rate else "", "memory",
            "waiting", ""]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    names = max((len(_name(row)) for row in rows), default=0)
    lines = [_line(" " * (names + 2), head, widths)] if cells else []
    for row, own in zip(measured, cells, strict=True):
        mark = "* " if row.candidate == kept else "  "
        running = progress if row.state == "running" else own[-1]
        lines.append(_line(f"{mark}{_name(row):<{names}}", [*own[:-1], running], widths))
    for row in others:
        state = progress or "running" if row.state == "running" else _state(row)
        lines.append(f"  {_name(row):<{names}}  {state}".rstrip())
    return lines


def _order(row: Row) -> float:
    return row.fastest.median if row.fastest else 0.0


def _name(row: Row) -> str:
    label = row.candidate.label
    return label if len(label) <= _LONGEST else label[: _LONGEST - 3] + "..."


def _state(row: Row) -> str:
    if row.state == "same run":
        return row.reason
    return f"{row.state}: {row.reason}" if row.reason else row.state


def _line(name: str, cells: Iterable[str], widths: Sequence[int]) -> str:
    aligned = [
        f"{cell:<{width}}" if number in (2, 6) else f"{cell:>{width}}"
        for number, (cell, width) in enumerate(zip([*cells][1:-1], [*widths][1:-1], strict=True))
    ]
    return "  ".join([name, *aligned, [*cells][-1]]).rstrip()


def _cells(row: Row, fastest: Outcome, slowest: float, rate: str, limit: int | None) -> list[str]:
    low, high = fastest.quartiles
    bar = "#" * max(1, round(_BAR * fastest.median / slowest))
    amount = getattr(fastest, rate) if rate else None
    memory = size_words(fastest.memory) + (f" of {size_words(limit)}" if limit else "")
    return [
        "",
        step_words(fastest.median),
        f"{step_words(low)} to {step_words(high)}",
        bar,
        f"{amount:,.0f}" if amount else "",
        memory,
        "" if fastest.waiting is None else f"{100 * fastest.waiting:.0f} %",
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
    off = result.predictions()
    if off:
        worst = max(off, key=abs)
        middle = sorted(off)[len(off) // 2]
        yield (
            f"estimate: runs needed {_off_words(middle)} memory than predicted (median of {len(off)}), "
            f"{_off_words(worst)} at worst"
        )


def _off_words(off: float) -> str:
    return f"{100 * abs(off):.0f} % {'less' if off < 0 else 'more'}"


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
