"""How a search is shown while it goes on: a live table on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdplaunch.cli.output import Output
from fsdplaunch.cli.progress import LINE_SECONDS
from fsdplaunch.run_dir import rank_folder
from fsdplaunch.terminal_text import printable
from fsdplaunch.tune.candidate import Candidate
from fsdplaunch.tune.measured import WARM_UP
from fsdplaunch.tune.rows import Row
from fsdplaunch.tune.search import Search
from fsdplaunch.tune.table import step_words, table_lines
from fsdplaunch.worker_status import read_heartbeat


class SearchProgress:
    """Shows a search.

    Args:
        search: Whose rows are shown.
        folder: Of its trials.
        out: Where to.
    """

    def __init__(self, search: Search, folder: Path, out: Output) -> None:
        self._search, self._folder, self._out = search, folder, out
        self._live = sys.stderr.isatty() and not out.quiet
        self._at: tuple[int, int, float] | None = None
        self._told: set[tuple[Candidate, int]] = set()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the table until the block ends, on a terminal."""
        if not self._live:
            yield
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        def table() -> Text:
            return Text("\n".join(map(printable, self._lines())), no_wrap=True, overflow="ellipsis")

        with Live(get_renderable=table, console=Console(stderr=True), transient=True, refresh_per_second=4):
            yield

    def changed(self) -> None:
        """Say what has become of each launch, once, where there is no table."""
        if self._live:
            return
        for row in list(self._search.rows.values()):
            key = (row.candidate, len(row.outcomes))
            if key not in self._told and row.state not in ("waiting", "running", "slower", "as fast"):
                self._told.add(key)
                self._out.say(f"  {row.candidate.label}: {_words(row)}")

    @contextmanager
    def launching(self, candidate: Candidate, number: int, steps: int) -> Iterator[None]:
        """Follow one launch; every ten seconds a line where there is no table."""
        self._at = (number, steps + WARM_UP, time.monotonic())
        ended = threading.Event()
        follower = threading.Thread(target=self._follow, args=(candidate, ended), daemon=True)
        if not self._live:
            follower.start()
        try:
            yield
        finally:
            ended.set()
            self._at = None

    def _follow(self, candidate: Candidate, ended: threading.Event) -> None:
        while not ended.wait(LINE_SECONDS):
            self._out.say(f"  {candidate.label}: {self._now()}")

    def _lines(self) -> list[str]:
        rows = list(self._search.rows.values())
        return table_lines(rows, limit=self._search.predictor.limit, progress=self._now())

    def _now(self) -> str:
        """Return how far the running launch is."""
        if self._at is None:
            return ""
        number, steps, began = self._at
        beat = read_heartbeat(rank_folder(self._folder / "trials" / f"{number:03d}", 0))
        made = beat.steps if beat is not None else 0
        return f"step {made} of {steps}, {time.monotonic() - began:.0f} s"


def _words(row: Row) -> str:
    """Return what has become of a candidate, and of its last launch."""
    last = row.outcomes[-1] if row.outcomes else None
    if row.state == "measured" and last is not None:
        low, high = last.quartiles
        return f"{step_words(last.median)} per step ({step_words(low)} to {step_words(high)})"
    return row.reason if row.state == "same run" else f"{row.state}: {row.reason}"
