"""One look at a run: how it is doing, what its ranks' steps take, and what the GPUs of this machine say."""

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplaunch.launch.runs import Run, log_files, read_run
from fsdplaunch.launch.secret_variables import hide_in_text
from fsdplaunch.launch.step_summary import Summary, read_ranks, summarize
from fsdplaunch.probe.hardware import GpuUse, read_gpu_use
from fsdplaunch.run_dir import JOB, PLAN, rank_folder, read_json, read_tail
from fsdplaunch.step_record import RankSteps

_STATE_SECONDS, _ASKED_SECONDS = 1.0, 10.0
"""Between two looks at a run's state, and two questions to a scheduler, whose controller answers many users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment."""

    run: Run
    summary: Summary
    ranks: Mapping[int, RankSteps]
    gpus: Mapping[int, GpuUse]  # of ranks on this machine

    @property
    def seconds_left(self) -> float | None:
        """Return how long the steps will take that are still to be made; None where nothing says how many."""
        seconds, left = self.summary.step_seconds, (self.summary.steps_total or 0) - self.summary.step
        return seconds * left if self.run.unfinished and seconds and left > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        found = {**self.run.to_dict(), **self.summary.to_dict(), "seconds_left": self.seconds_left}
        for row in found["ranks"]:
            if (use := self.gpus.get(row["rank"])) is not None:
                row |= {"gpu_percent": use.percent, "gpu_celsius": use.celsius}
        return found


class RunWatcher:
    """Looks at one run, again and again."""

    def __init__(self, run: Run) -> None:
        self.run, self._asked = run, time.monotonic()

    def refresh(self) -> None:
        """Look again whether the run goes on, if that may be asked now."""
        seconds = _STATE_SECONDS if self.run.route in ("here", "ssh") else _ASKED_SECONDS
        if self.run.unfinished and time.monotonic() - self._asked > seconds:
            self.run, self._asked = read_run(self.run.dir), time.monotonic()

    def look(self) -> Snapshot:
        """Return how the run is doing now."""
        self.refresh()
        ranks, names = read_ranks(self.run.part), _gpus_here(self.run)
        use = read_gpu_use() if names else {}
        gpus = {rank: use[name] for rank, name in names.items() if name in use}
        return Snapshot(run=self.run, summary=summarize(ranks), ranks=ranks, gpus=gpus)

    def last_line(self, rank: int) -> str:
        """Return the last line that a rank printed."""
        files = [file for stream in ("stdout", "stderr") for file in log_files(self.run, rank=rank, stream=stream)]
        newest = max(files, key=lambda file: file.stat().st_mtime, default=Path())
        return hide_in_text(next((line.strip() for line in reversed(read_tail(newest)) if line.strip()), ""))


def _gpus_here(run: Run) -> dict[int, str]:
    """Return the GPU of each rank that runs on this machine, as CUDA_VISIBLE_DEVICES names it."""
    found: dict[int, str] = {}
    for node in (run.part, *run.part.glob("node[0-9]*")) if run.unfinished else ():
        gpus = read_json(node / PLAN).get("gpus")
        if read_json(node / JOB).get("host") == socket.gethostname() and isinstance(gpus, list):
            names = (path.name for path in node.glob(str(rank_folder(Path(), "[0-9]*"))))
            ranks = sorted(int(name) for name in names if name.isdecimal())
            found |= dict(zip(ranks, map(str, gpus), strict=False))
    return found
