"""What `fsdplaunch check --compare` prints: a table of steps and what came of them, or one object."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fsdplaunch.launch.comparison.causes import Cause
from fsdplaunch.launch.comparison.records import RunFacts, StepFacts
from fsdplaunch.launch.comparison.rounding import is_equal
from fsdplaunch.launch.comparison.verdict import Verdict
from fsdplaunch.launch.plan import LaunchPlan


def as_lines(
    plan: LaunchPlan, plain: RunFacts, sharded: RunFacts, verdict: Verdict, cause: Cause | None
) -> list[str]:
    """Return the table and the words below it.

    Args:
        plan: Of the workers.
        plain: Of one process.
        sharded: Of the workers.
        verdict: Of comparing both.
        cause: Where they part.
    """
    return [*_table(plain.steps, sharded.steps, plan.workers), *_words(plan, plain, verdict, cause)]


def _table(plain: Sequence[StepFacts], sharded: Sequence[StepFacts], workers: int) -> list[str]:
    head = ("step", "loss, one process", f"loss, {workers} workers", "gradient norm", f"{workers} workers")
    rows = [
        (str(number), _loss(one), _loss(many), f"{one.norm:.6g}", f"{many.norm:.6g}")
        for number, (one, many) in enumerate(zip(plain, sharded, strict=False), start=1)
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in (head, *rows)
    ]
    return [*lines, ""]


def _loss(step: StepFacts) -> str:
    return " ".join(f"{loss:.6g}" for loss in step.losses) or "none"


def _words(plan: LaunchPlan, plain: RunFacts, verdict: Verdict, cause: Cause | None) -> list[str]:
    steps = f"{len(plain.steps)} step{'s' if len(plain.steps) != 1 else ''}"
    if verdict.first is None or cause is None:
        count, by = verdict.parameters
        noise = f"; {len(verdict.noise)} left out, whose gradients are rounding" if verdict.noise else ""
        return [
            f"equal: {plan.script} computes over {plan.workers} workers what it does in one process",
            f"  {steps}: losses and gradients to {verdict.largest:.1e}, {count} parameters to {by:.1e}{noise}",
        ]
    first = verdict.first
    place = {None: "after the last step", 0: "before the first step"}.get(first.step, f"at step {first.step}")
    values = (
        "" if first.plain is None else f": {first.plain:.6g} in one process, {first.sharded:.6g} over the workers"
    )
    word = "equal but for rounding, which shows" if is_equal(verdict, cause) else "different"
    return [
        f"{word} {place}: {first.what}{values} (by {first.by:.1e})",
        f"  cause  {cause.text}",
        f"  try    {cause.hint}",
    ]


def as_data(
    plan: LaunchPlan, plain: RunFacts, sharded: RunFacts, verdict: Verdict, cause: Cause | None, tolerance: float
) -> dict[str, Any]:
    """Return the same as plain data."""
    rows = zip(plain.steps, sharded.steps, strict=False)
    return {
        "equal": is_equal(verdict, cause),
        "workers": plan.workers,
        "tolerance": tolerance,
        "steps": [
            {"losses": [one.losses, many.losses], "gradient_norms": [one.norm, many.norm]} for one, many in rows
        ],
        "largest_difference": verdict.largest,
        "parameters": {"compared": verdict.parameters[0], "largest_difference": verdict.parameters[1]},
        "left_out": list(verdict.noise),
        "first": _finite(asdict(verdict.first)) if verdict.first else None,
        "cause": asdict(cause) if cause else None,
        "run_dir": str(plan.run_dir),
    }


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that JSON has: None for what is infinite."""
    return {key: None if value == math.inf else value for key, value in values.items()}
