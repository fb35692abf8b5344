"""The estimate in a terminal: a table with a bar per way to shard, then the answers. Pure: returns lines."""

from collections.abc import Iterator, Sequence

from fsdplaunch.byte_sizes import GIB
from fsdplaunch.estimate.memory import PARTS, verdict_of
from fsdplaunch.estimate.report import Report, Row, moment_words, shares

LETTERS = {
    "parameters": "p", "gradients": "g", "optimizer": "o", "gathered": "w", "communication": "c",
    "activations": "a", "temporary": "t", "context": "x",
}  # fmt: skip
"""The letter that stands for each part in a bar."""
_HEADS = ("params", "grads", "optim", "gathered", "comm", "activ", "temp", "context")
_MOST_CHANGES = 5


def text_report(report: Report, *, width: int = 100) -> list[str]:
    """Return the whole report as lines.

    Args:
        report: The estimate.
        width: Columns of the terminal.
    """
    lines = [report.title, report.model, "", *_table(report)]
    lines += ["", *_bars(report, width)]
    if report.exact is not None:
        lines += ["", *_exact_lines(report)]
    lines += ["", *_answers(report)]
    if report.changes:
        lines += ["", "to change                                    saves   then    cost", *_change_lines(report)]
    return [*lines, *(["", *(f"note: {note}" for note in report.notes)] if report.notes else [])]


def _gib(amount: int) -> str:
    return f"{amount / GIB:.1f}" if amount >= GIB / 20 or not amount else "<0.1"


def _table(report: Report) -> Iterator[str]:
    names = [row.label for row in report.rows]
    wide = max(len("GiB per GPU, at the peak"), *map(len, names))
    yield f"{'GiB per GPU, at the peak':<{wide}}" + "".join(f"{head:>9}" for head in _HEADS) + f"{'total':>8}"
    for name, row in zip(names, report.rows, strict=True):
        parts = row.need.parts
        cells = "".join(f"{_gib(amount):>9}" for amount in (*(parts[part] for part in PARTS), row.need.context))
        yield f"{name:<{wide}}{cells}{_gib(row.need.gpu):>8}  {_verdict(row)}"


def _verdict(row: Row) -> str:
    host = f"{row.need.host_per_node / GIB:.0f} GiB of host memory" if row.need.host else ""
    words = [row.verdict if row.verdict != "unknown" else "", host]
    return ", ".join(word for word in words if word)


def _bars(report: Report, width: int) -> Iterator[str]:
    """Draw a bar per way to shard, a letter per part; `|` marks the memory of one GPU where bars reach it."""
    wide = max(len(row.label) for row in report.rows)
    room = max(20, min(width, 120) - wide - 2)
    for row in report.rows:
        bar = bar_of(shares(row.need.parts, row.need.context), report.longest, room)
        if report.memory:
            mark = min(room - 1, round(room * report.memory / report.longest))
            bar = f"{bar:<{room}}"
            bar = (bar[:mark] + "|" + bar[mark + 1 :]).rstrip()
        yield f"{row.label:<{wide}}  {bar}"
    shown = [dict(shares(row.need.parts, row.need.context)) for row in report.rows]
    used = [name for name in LETTERS if any(name in parts for parts in shown)]
    yield " " * (wide + 2) + "  ".join(f"{LETTERS[name]} {name}" for name in used)


def bar_of(parts: Sequence[tuple[str, int]], longest: int, room: int) -> str:
    """Draw parts one after the other.

    Args:
        parts: (name, amount), in order.
        longest: The amount that fills the room.
        room: Characters.
    """
    bar, done = "", 0
    for name, amount in parts:
        done += amount
        bar += LETTERS[name] * (round(room * done / longest) - len(bar))
    return bar


def _exact_lines(report: Report) -> Iterator[str]:
    trace = report.exact
    if trace is None:
        return
    calculated = report.yours.need.total
    where = f" of {trace.module}" if trace.module else ""
    yield (
        f"exact: {trace.total / GIB:.2f} GiB per GPU at the peak, in the {trace.phase}{where}; "
        f"the quick formula says {calculated / GIB:.2f} ({100 * (calculated / max(trace.total, 1) - 1):+.0f} %)"
    )
    parts = ", ".join(f"{name} {_gib(amount)}" for name, amount in trace.parts.items() if amount)
    yield f"       {parts}; traced in {trace.seconds:.0f} s"


def _answers(report: Report) -> Iterator[str]:
    need, setup = report.yours.need, report.setup
    if report.memory is None:
        yield "fits?           the GPU's memory is not known here: pass --gpu-memory, for example 80GB"
    else:
        spare = (report.memory - report.gpu) / GIB
        words = f"{spare:.1f} GiB to spare" if spare >= 0 else f"{-spare:.1f} GiB too much"
        yield (
            f"{report.verdict:<15} {report.gpu / GIB:.1f} of {report.memory / GIB:.1f} GiB per GPU"
            f" ({report.memory_from}), {words}"
        )
    yield f"peak            {moment_words(need)}"
    if report.memory is not None:
        plural = "" if report.fewest == 1 else "s"
        fewest = f"{report.fewest} rank{plural}" if report.fewest else "no number of ranks is enough"
        yield f"smallest world  {fewest}, at a batch of {setup.batch_size} x {setup.length} tokens per rank"
        if report.batch is not None:
            batch = f"{report.batch} x {setup.length} tokens per rank" if report.batch else "not even 1"
            yield f"largest batch   {batch}, with {setup.world} ranks"
    loading, offloaded = need.loading / GIB, need.host_per_node / GIB
    yield f"host memory     {loading:.1f} GiB per node while loading, {offloaded:.1f} for offloaded state"
    yield f"checkpoint      {need.checkpoint / GIB:.1f} GiB, optimizer included"


def _change_lines(report: Report) -> Iterator[str]:
    for change in report.changes[:_MOST_CHANGES]:
        verdict = verdict_of(change.need.gpu, report.memory)
        then = f"{change.need.gpu / GIB:6.1f}" + (f" ({verdict})" if verdict != "unknown" else "")
        yield f"{change.what:<41} {-change.saves / GIB:+8.1f} {then}   {change.cost}"
        yield f"    {change.option}"
