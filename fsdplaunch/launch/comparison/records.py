"""What the processes of both runs wrote down, put together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplaunch.errors import LaunchError
from fsdplaunch.run_dir import COMPARED_PLAIN, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One optimizer step of one run.

    Attributes:
        losses: The values backward was called on; the mean over the workers.
        totals: The same, summed over the workers.
        norm: Of all gradients together.
        norms: Of each parameter's gradient.
        rows: Rows of the first batch on each process; None where no tensor was seen.
        contents: The sum of the first batch on each process.
        draws: Whether random numbers were drawn in the forward pass.
        random: What each process has drawn so far, as a digest.
        line: Of the script's backward.
    """

    losses: tuple[float, ...]
    totals: tuple[float, ...]
    norm: float
    norms: Mapping[str, float]
    rows: tuple[int | None, ...]
    contents: tuple[float, ...]
    draws: bool
    line: str
    random: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What one run computed.

    Attributes:
        steps: In their order.
        start: The norm of each parameter before the first step.
        layers: Layers that compute something else with another batch.
        parameters: How far each final parameter is from the plain run's; None where that has no such parameter.
        told: What the run said to differ from one process.
    """

    steps: Sequence[StepFacts]
    start: Mapping[str, float]
    layers: Sequence[str]
    parameters: Mapping[str, float | None]
    told: Sequence[str] = ()


def read_run(folder: Path, workers: int, alone: str = COMPARED_PLAIN) -> RunFacts | None:
    """Return what a run computed; None when not all of its processes wrote a record with a step.

    Args:
        folder: Of the comparison.
        workers: How many took part; 0 for one plain process.
        alone: The file of that process.
    """
    names = [f"rank{rank}.json" for rank in range(workers)] or [alone]
    records = [read_json(folder / name) for name in names]
    if not all(record.get("steps") for record in records):
        return None
    for record in records:
        record["steps"] = _joined(record["steps"])
    counts = {len(record["steps"]) for record in records}
    if len(counts) > 1:
        msg = f"the workers made different numbers of optimizer steps: {sorted(counts)}"
        raise LaunchError(msg, hint="see what each worker read: the script decides by rank how long it trains")
    return RunFacts(
        steps=[_step(parts) for parts in zip(*(record["steps"] for record in records), strict=True)],
        start=_norms([record["start"] for record in records]),
        layers=records[0]["layers"],
        told=records[0].get("told", ()),
        parameters=records[0].get("parameters", {}),
    )


def _joined(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a process's steps, those of several optimizers after one backward as one.

    A script may have an optimizer for each parameter, in the order of a set, which differs by process.
    """
    joined: list[dict[str, Any]] = []
    for step in steps:
        if joined and not step["losses"] and not step["gradients"].keys() & joined[-1]["gradients"].keys():
            joined[-1] = {**joined[-1], "gradients": joined[-1]["gradients"] | step["gradients"]}
        else:
            joined.append(step)
    return joined


def _step(parts: Sequence[Mapping[str, Any]]) -> StepFacts:
    losses = list(zip(*(part["losses"] for part in parts), strict=False))
    norms = _norms([part["gradients"] for part in parts])
    return StepFacts(
        losses=tuple(sum(values) / len(values) for values in losses),
        totals=tuple(sum(values) for values in losses),
        norm=math.sqrt(sum(norm**2 for norm in norms.values())),
        norms=norms,
        rows=tuple(part["rows"] for part in parts),
        contents=tuple(part["content"] for part in parts),
        draws=any(part["draws"] for part in parts),
        random=tuple(part.get("random", "") for part in parts),
        line=parts[0]["line"],
    )


def _norms(parts: Sequence[Mapping[str, tuple[float, bool]]]) -> dict[str, float]:
    """Return norms of the full tensors: shards add up, replicas count once."""
    squares: dict[str, float] = {}
    for part in parts:
        for name, (square, is_shard) in part.items():
            squares[name] = squares.get(name, 0.0) + square if is_shard else square
    return {name: math.sqrt(square) for name, square in squares.items()}
