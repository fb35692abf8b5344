"""What two runs computed, whether that is equal, and at which step and tensor they part. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdplaunch.errors import LaunchError
from fsdplaunch.run_dir import COMPARED_PLAIN, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One optimizer step of one run."""

    losses: tuple[float, ...]  # the values backward was called on; the mean over the workers
    totals: tuple[float, ...]  # the same, summed over the workers
    norm: float  # of all gradients together
    norms: Mapping[str, float]  # of each parameter's gradient
    rows: tuple[int | None, ...]  # rows of the first batch on each process; None where no tensor was seen
    contents: tuple[float, ...]  # the sum of the first batch on each process
    draws: bool  # whether random numbers were drawn in the forward pass
    line: str  # of the script's backward
    random: tuple[str, ...] = ()  # what each process has drawn so far, as a digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What one run computed."""

    steps: Sequence[StepFacts]  # in their order
    start: Mapping[str, float]  # the norm of each parameter before the first step
    layers: Sequence[str]  # layers that compute something else with another batch
    # how far each final parameter is from the plain run's; None where that has no such parameter
    parameters: Mapping[str, float | None]
    told: Sequence[str] = ()  # what the run said to differ from one process


def read_run(folder: Path, workers: int, alone: str = COMPARED_PLAIN) -> RunFacts | None:
    """Return what so many workers computed, or 0: one process, into the file `alone`.

    None when not all processes wrote a record with a step.
    """
    names = [f"rank{rank}.json" for rank in range(workers)] or [alone]
    records = [read_json(folder / name) for name in names]
    if not all(record.get("steps") for record in records):
        return None
    steps = [_joined(record["steps"]) for record in records]
    if len(counts := {len(each) for each in steps}) > 1:
        msg = f"the workers made different numbers of optimizer steps: {sorted(counts)}"
        raise LaunchError(
            msg, hint="check the batches of each worker: the script makes the number of steps depend on the rank"
        )
    return RunFacts(
        steps=[_step(parts) for parts in zip(*steps, strict=True)],
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


_NOISE = 1e-6
"""A gradient below this part of the whole is rounding; an optimizer that divides by its size steps anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two runs part first."""

    step: int | None  # from 1; 0 before the first; None for the final parameters
    what: str  # `loss`, `gradient norm`, `number of steps`, or `initial`, `gradient of`, `parameter` and a name
    plain: float | None  # the value in one process
    sharded: float | None  # the value over the workers
    by: float  # relative difference; infinite where there is nothing to compare with


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What comparing showed."""

    first: Difference | None  # where the runs part; None when they are equal
    largest: float  # the largest relative difference of a loss or a norm
    parameters: tuple[int, float]  # how many final parameters were compared, and by how much they differ at most
    noise: tuple[str, ...]  # parameters left out, because their gradients are rounding


def compare(plain: RunFacts, sharded: RunFacts, tolerance: float) -> Verdict:
    """Compare two runs in the order in which they compute: initial weights, then each step, then the end.

    What is farther apart than the relative tolerance is different.
    """
    sharded = added_up(plain, sharded, tolerance)
    noise = tuple(name for name in plain.start if _is_noise(name, plain) and _is_noise(name, sharded))
    found = [
        _difference(0, f"initial {name}", plain.start[name], sharded.start[name])
        for name in plain.start
        if name in sharded.start
    ]
    for number, (one, many) in enumerate(zip(plain.steps, sharded.steps, strict=False), start=1):
        found += _of_step(number, one, many)
    counts = len(plain.steps), len(sharded.steps)
    if counts[0] != counts[1]:
        step, what = min(counts) + 1, "number of steps"
        found.append(Difference(step=step, what=what, plain=counts[0], sharded=counts[1], by=math.inf))
    ends = _ends(plain, sharded, noise)
    return Verdict(
        first=next((each for each in (*found, *ends) if not each.by <= tolerance), None),
        largest=max((each.by for each in found if each.step), default=0.0),
        parameters=(len(ends), max((each.by for each in ends), default=0.0)),
        noise=noise,
    )


def distances(plain: RunFacts, other: RunFacts) -> list[float]:
    """Return how far a run is from the plain one at most, at each step, and last in the final parameters.

    The workers' has the sums of their losses where these are `added_up`.
    """
    pairs = zip(plain.steps, other.steps, strict=False)
    far = [max(each.by for each in _of_step(number, *pair)) for number, pair in enumerate(pairs, start=1)]
    noise = tuple(name for name in plain.start if _is_noise(name, plain))
    return [*far, max((each.by for each in _ends(plain, other, noise)), default=0.0)]


def added_up(plain: RunFacts, sharded: RunFacts, tolerance: float) -> RunFacts:
    """Return the workers' run with the sums of their losses where these are what one process has.

    Each worker's loss is then its part of a sum; the norm shows that its gradients are added up too.
    """

    def is_sum(one: StepFacts, many: StepFacts) -> bool:
        pairs = (*zip(one.losses, many.totals, strict=False), (one.norm, many.norm))
        return all(_difference(0, "", *pair).by <= tolerance for pair in pairs)

    pairs = zip(plain.steps, sharded.steps, strict=False)
    steps = [replace(many, losses=many.totals) if is_sum(one, many) else many for one, many in pairs]
    return replace(sharded, steps=[*steps, *sharded.steps[len(steps) :]])


def _of_step(number: int, one: StepFacts, many: StepFacts) -> Iterator[Difference]:
    for plain, sharded in zip(one.losses, many.losses, strict=False):
        yield _difference(number, "loss", plain, sharded)
    yield _difference(number, "gradient norm", one.norm, many.norm)
    names = sorted(one.norms.keys() & many.norms.keys())
    if not names:
        return
    # One gradient may be wrong while the norm of all hides it; measured by the whole, for small ones are rounding.
    worst = max(names, key=lambda name: _apart(one.norms[name], many.norms[name]))
    pair = one.norms[worst], many.norms[worst]
    whole = max(one.norm, 1e-12) if math.isfinite(one.norm) else max(*map(abs, pair), 1e-6)
    by = _apart(*pair) and _apart(*pair) / whole
    yield Difference(step=number, what=f"gradient of {worst}", plain=pair[0], sharded=pair[1], by=by)


def _apart(plain: float, sharded: float) -> float:
    """Return how far apart two numbers are; 0 for two that are infinite or not numbers in the same way."""
    if plain == sharded or (math.isnan(plain) and math.isnan(sharded)):
        return 0.0
    return math.inf if math.isnan(plain) or math.isnan(sharded) else abs(plain - sharded)


def _difference(step: int, what: str, plain: float, sharded: float) -> Difference:
    by = _apart(plain, sharded)
    by = by / max(abs(plain), abs(sharded), 1e-6) if by and math.isfinite(by) else by
    return Difference(step=step, what=what, plain=plain, sharded=sharded, by=by)


def _ends(plain: RunFacts, sharded: RunFacts, noise: tuple[str, ...]) -> list[Difference]:
    return [
        Difference(
            step=None, what=f"parameter {name}", plain=None, sharded=None, by=math.inf if by is None else by
        )
        for name, by in sharded.parameters.items()
        if name in plain.start and name not in noise
    ]


def _is_noise(name: str, run: RunFacts) -> bool:
    """Return whether a parameter was trained with nothing but rounding in its gradients."""
    trained = [step for step in run.steps if name in step.norms]
    return bool(trained) and all(step.norms[name] <= _NOISE * step.norm for step in trained)
