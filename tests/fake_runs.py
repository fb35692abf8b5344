"""Folders of runs as launches leave them, without a launch."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdplaunch.launch.runs import write_job
from fsdplaunch.run_dir import LATEST, rank_folder
from fsdplaunch.step_record import Step, StepWriter

GIB = 2**30
Times = Callable[[int, int], Mapping[str, float]]
"""What a step of a rank took, by rank and number."""


def even(rank: int, number: int) -> Mapping[str, float]:
    """A run without a slow rank: 100 ms a step, a hundredth of it waiting for data, a fifth for others."""
    memory = GIB * (1 + rank / 8)
    return {"seconds": 0.1, "data_seconds": 0.001, "peer_seconds": 0.02, "memory_bytes": memory, "samples": 8}


def slow(which: int, factor: float = 3.0) -> Times:
    """A run in which one rank computes longer, and the others wait for it."""

    def times(rank: int, number: int) -> Mapping[str, float]:
        own = 0.1 * (factor if rank == which else 1)
        wait = 0.1 * factor + 0.01 - own
        return {**even(rank, number), "seconds": 0.1 * factor + 0.01, "peer_seconds": wait}

    return times


def write_steps(folder: Path, rank: int, count: int, times: Times, *, end: float | None = None) -> None:
    """Write a rank's record of so many steps, the last of which ended now."""
    folder.mkdir(parents=True, exist_ok=True)
    writer, end = StepWriter(folder), time.time() if end is None else end
    for number in range(1, count + 1):
        took = dict(times(rank, number))
        ended = end - (count - number) * took["seconds"]
        writer.count(ended)
        peak = took.get("memory_bytes", float("nan"))
        writer.add(Step(number=number, ended=ended, **{"peak_bytes": peak, **took}))


def make_run(
    folder: Path,
    name: str = "2026-01-02_030405-ab12",
    *,
    ranks: int = 2,
    steps: int = 40,
    times: Times = even,
    result: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    age: float = 3600.0,
    runs: bool = False,  # this process is its launcher
) -> Path:
    """Write a run's folder, of which `latest` is another name; returns it."""
    run_dir = folder / name
    run_dir.mkdir(parents=True)
    about = {"script": "train.py", "arguments": ["--lr", "3e-4"], "world_size": ranks, "workers": ranks}
    (run_dir / "plan.json").write_text(json.dumps({**about, "device": "cpu", "gpus": [], **(plan or {})}))
    started = time.time() - age
    os.utime(run_dir / "plan.json", (started, started))
    for rank in range(ranks):
        place = rank_folder(run_dir, rank)
        write_steps(place, rank, steps, times)
        (place / "stdout.log").write_text(f"hello from {rank}\nloss {rank}.5\n")
    if runs:
        write_job(run_dir, route="here", nodes=[], versions={"torch": "2.13.0"})
    else:
        ended = {"exit_code": 0, "stopped_by": None, "seconds": 125.0, "failure": None}
        (run_dir / "result.json").write_text(json.dumps({**ended, **(result or {})}))
    latest = folder / LATEST
    latest.unlink(missing_ok=True)
    latest.symlink_to(name)
    return run_dir
