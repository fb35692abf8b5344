"""Rounding that grows is told from another computation by what one process does to itself."""

from dataclasses import replace

import pytest

from fsdplaunch.comparison.causes import Cause, may_be_rounding, rounding
from fsdplaunch.comparison.verdict import Difference, RunFacts, StepFacts, compare

STEP = StepFacts(
    losses=(1.0,),
    totals=(1.0,),
    norm=5.0,
    norms={"a": 3.0, "b": 4.0},
    rows=(8,),
    contents=(3.0,),
    draws=False,
    line="train.py:9",
)


def run(*by: float, end: float = 0.0) -> RunFacts:
    """Return a run whose losses are so far from 1, and whose parameter is so far from the plain one."""
    steps = [replace(STEP, losses=(1.0 - far,), totals=(2.0,)) for far in by]
    return RunFacts(steps=steps, start={"a": 1.0}, layers=[], parameters={"a": end})


PLAIN = run(0, 0, 0)


def found(sharded: RunFacts, changed: RunFacts) -> Cause | None:
    first = compare(PLAIN, sharded, 1e-4).first
    assert first is not None
    return rounding(first, PLAIN, sharded, changed)


@pytest.mark.parametrize(
    ("sharded", "changed"),
    [
        (run(1e-7, 1e-5, 2e-4), run(1e-7, 3e-6, 1e-5)),  # farther than its own reach
        (run(6e-5, 6e-5, 2e-4), run(1e-7, 3e-6, 1e-4)),  # early: a part is wrong from the beginning
        (run(1e-7, 1e-7, 1e-7, end=1e-2), run(1e-7, 1e-7, 1e-7, end=1e-6)),  # in a parameter alone
        (run(1e-7, 1e-5, 2e-4), run(1e-7)),  # it ended earlier
        (run(1e-7, 1e-5, float("nan")), run(1e-7, 1e-5, 1e-4)),
    ],
)
def test_what_goes_farther_than_rounding_is_something_else(sharded, changed):
    assert found(sharded, changed) is None


def test_final_parameters_are_measured_by_their_own_reach():
    assert found(run(1e-7, 1e-7, 1e-7, end=2e-4), run(1e-7, 1e-7, 1e-7, end=1e-4)) is not None


@pytest.mark.parametrize(
    ("step", "by", "id_", "open_"),
    [
        (2, 1e-3, "gradients", True),
        (0, 1e-3, "gradients", False),
        (2, float("inf"), "unequal-means", False),
        (1, 0.5, "loss-is-a-sum", False),
        (1, 0.5, "randomness", True),
    ],
)
def test_proven_causes_and_other_beginnings_are_not_asked_for_rounding(step, by, id_, open_):
    first = Difference(step=step, what="loss", plain=1.0, sharded=1.0, by=by)
    assert may_be_rounding(first, Cause(id=id_, text="", hint="")) is open_
