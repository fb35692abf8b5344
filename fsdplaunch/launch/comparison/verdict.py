"""Say whether two runs are equal, or at which step and tensor they part."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fsdplaunch.launch.comparison.records import RunFacts, StepFacts

_NOISE = 1e-6
"""A gradient below this part of the whole is rounding; an optimizer that divides by its size steps anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two runs part first.

    Attributes:
        step: From 1; 0 before the first; None for the final parameters.
        what: `loss`, `gradient norm`, `number of steps`, or `initial`, `gradient of`, `parameter` and a name.
        plain: The value in one process.
        sharded: The value over the workers.
        by: Relative difference; infinite where there is nothing to compare with.
    """

    step: int | None
    what: str
    plain: float | None
    sharded: float | None
    by: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What comparing showed.

    Attributes:
        first: Where the runs part; None when they are equal.
        largest: The largest relative difference of a loss or a norm.
        parameters: How many final parameters were compared, and by how much they differ at most.
        noise: Parameters left out, because their gradients are rounding.
    """

    first: Difference | None
    largest: float
    parameters: tuple[int, float]
    noise: tuple[str, ...]


def compare(plain: RunFacts, sharded: RunFacts, tolerance: float) -> Verdict:
    """Compare two runs in the order in which they compute: initial weights, then each step, then the end.

    Args:
        plain: Of one process.
        sharded: Of the workers.
        tolerance: Relative; what is farther apart is different.
    """
    sharded = added_up(plain, sharded, tolerance)
    noise = tuple(name for name in plain.start if _is_noise(name, plain) and _is_noise(name, sharded))
    steps = list(_differences(plain, sharded))
    ends = list(_ends(plain, sharded, noise))
    far = [each for each in (*steps, *ends) if not each.by <= tolerance]
    sizes = [each.by for each in steps if each.step]
    return Verdict(
        first=far[0] if far else None,
        largest=max(sizes, default=0.0),
        parameters=(len(ends), max((each.by for each in ends), default=0.0)),
        noise=noise,
    )


def distances(plain: RunFacts, other: RunFacts) -> list[float]:
    """Return how far a run is from the plain one at most, at each step, and last in the final parameters.

    Args:
        plain: Of one process.
        other: Of the workers, or of another process; with the sums of their losses where these are `added_up`.
    """
    pairs = zip(plain.steps, other.steps, strict=False)
    far = [max(each.by for each in _of_step(number, *pair)) for number, pair in enumerate(pairs, start=1)]
    noise = tuple(name for name in plain.start if _is_noise(name, plain))
    return [*far, max((each.by for each in _ends(plain, other, noise)), default=0.0)]


def added_up(plain: RunFacts, sharded: RunFacts, tolerance: float) -> RunFacts:
    """Return the workers' run with the sums of their losses where these are what one process has.

    Each worker's loss is then its part of a sum; the norm shows that its gradients are added up too.
    """
    pairs = zip(plain.steps, sharded.steps, strict=False)
    steps = [replace(many, losses=many.totals) if _is_sum(one, many, tolerance) else many for one, many in pairs]
    return replace(sharded, steps=[*steps, *sharded.steps[len(steps) :]])


def _is_sum(one: StepFacts, many: StepFacts, tolerance: float) -> bool:
    losses = [(0, "loss", *pair) for pair in zip(one.losses, many.totals, strict=False)]
    return all(_difference(*each).by <= tolerance for each in (*losses, (0, "norm", one.norm, many.norm)))


def _differences(plain: RunFacts, sharded: RunFacts) -> Iterator[Difference]:
    for name, norm in plain.start.items():
        if name in sharded.start:
            yield _difference(0, f"initial {name}", norm, sharded.start[name])
    for number, (one, many) in enumerate(zip(plain.steps, sharded.steps, strict=False), start=1):
        yield from _of_step(number, one, many)
    if len(plain.steps) != len(sharded.steps):
        yield Difference(
            step=min(len(plain.steps), len(sharded.steps)) + 1,
            what="number of steps",
            plain=len(plain.steps),
            sharded=len(sharded.steps),
            by=math.inf,
        )


def _of_step(number: int, one: StepFacts, many: StepFacts) -> Iterator[Difference]:
    for plain, sharded in zip(one.losses, many.losses, strict=False):
        yield _difference(number, "loss", plain, sharded)
    norm = _difference(number, "gradient norm", one.norm, many.norm)
    worst = max((_difference(number, f"gradient of {name}", *pair) for name, pair in _pairs(one, many)), key=_by)
    yield norm
    # One gradient may be wrong while the norm of all hides it; measured by the whole, for small ones are rounding.
    share = _by(worst) / max(one.norm, 1e-12) if math.isfinite(one.norm) else worst.by
    yield Difference(step=number, what=worst.what, plain=worst.plain, sharded=worst.sharded, by=share)


def _pairs(one: StepFacts, many: StepFacts) -> list[tuple[str, tuple[float, float]]]:
    names = one.norms.keys() & many.norms.keys()
    return [(name, (one.norms[name], many.norms[name])) for name in sorted(names)] or [
        ("all", (one.norm, many.norm))
    ]


def _by(difference: Difference) -> float:
    """Return how far apart two numbers are; not numbers, or infinite, in both they are equal."""
    plain, sharded = difference.plain or 0.0, difference.sharded or 0.0
    if _are_equal(plain, sharded):
        return 0.0
    return math.inf if math.isnan(plain) or math.isnan(sharded) else abs(plain - sharded)


def _are_equal(plain: float, sharded: float) -> bool:
    return plain == sharded or (math.isnan(plain) and math.isnan(sharded))


def _difference(step: int, what: str, plain: float, sharded: float) -> Difference:
    by = 0.0 if _are_equal(plain, sharded) else abs(plain - sharded) / max(abs(plain), abs(sharded), 1e-6)
    return Difference(step=step, what=what, plain=plain, sharded=sharded, by=by)


def _ends(plain: RunFacts, sharded: RunFacts, noise: tuple[str, ...]) -> Iterator[Difference]:
    for name, by in sharded.parameters.items():
        if name in plain.start and name not in noise:
            size = math.inf if by is None else by
            yield Difference(step=None, what=f"parameter {name}", plain=None, sharded=None, by=size)


def _is_noise(name: str, run: RunFacts) -> bool:
    """Return whether a parameter was trained with nothing but rounding in its gradients."""
    trained = [step for step in run.steps if name in step.norms]
    return bool(trained) and all(step.norms[name] <= _NOISE * step.norm for step in trained)
