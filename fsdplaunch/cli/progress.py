"""Progress of long work: a live bar on a terminal, a plain line every ten seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fsdplaunch.cli.output import Output

LINE_SECONDS = 10.0

Update = Callable[[str, int, int, str], None]
"""Takes the phase, the bytes done, the bytes in all, and what is at hand."""


def size_text(nbytes: float) -> str:
    """Bytes in the unit a person would choose, in powers of 1000 as disks are sold: `13.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:  # noqa: PLR2004
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


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
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[item]}"),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def update(phase: str, done: int, total: int, item: str) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total, item="")
            bars.update(tasks[phase], completed=done, item=item)

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
            out.say(f"  {phase} {share}%  {size_text(done)} of {size_text(total)}{left}  {item}")

    return update
