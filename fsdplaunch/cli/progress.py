"""Progress of long work: a live bar on a terminal, a plain line every ten seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fsdplaunch.byte_sizes import size_words
from fsdplaunch.cli.output import Output
from fsdplaunch.terminal_text import one_line

LINE_SECONDS = 10.0

Update = Callable[[str, int, int, str], None]
"""Takes the phase, the bytes done, the bytes in all, and what is at hand."""


@contextmanager
def byte_progress(out: Output) -> Iterator[Update]:
    """Show how far a transfer is, on stderr, until the block ends."""
    if sys.stderr.isatty() and not out.quiet:
        with _live() as update:
            yield update
    else:
        yield _lines(out)


@contextmanager
def _live() -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[item]}", markup=False),
    )
    tasks: dict[str, tuple[TaskID, float]] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def update(phase: str, done: int, total: int, item: str) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total, amount="", item=""), time.monotonic()
            task, start = tasks[phase]
            rate = done / max(time.monotonic() - start, 1e-3)
            amount = f"{size_words(done)} of {size_words(total)}, {size_words(rate)}/s"
            bars.update(task, completed=done, amount=amount, item=one_line(item))

        yield update


def _lines(out: Output) -> Update:
    start = last = time.monotonic()

    def update(phase: str, done: int, total: int, item: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_SECONDS:
            last = now
            rate = done / (now - start)
            left = f", {(total - done) / rate:.0f} s left" if rate else ""
            share = 100 * done // max(total, 1)
            out.say(f"  {phase} {share}%  {size_words(done)} of {size_words(total)}{left}  {item}")

    return update
