"""Two records, each put together from what processes wrote: equal, or where they part, and why."""

import json
import math
from dataclasses import replace

import pytest

from fsdplaunch.comparison.causes import Cause, find_cause, may_be_rounding, rounding
from fsdplaunch.comparison.verdict import Difference, RunFacts, StepFacts, compare, read_run
from fsdplaunch.errors import LaunchError

STEP = StepFacts(
    losses=(1.0,),
    totals=(2.0,),
    norm=5.0,
    norms={"a": 3.0, "b": 4.0},
    rows=(4, 4),
    contents=(1.0, 2.0),
    draws=False,
    line="train.py:9",
    random=("r", "r"),
)
ONE = replace(STEP, totals=(1.0,), rows=(8,), contents=(3.0,), random=("r",))
START = {"a": 1.0, "b": 1.0}
ENDS = {"a": 0.0, "b": 1e-7}
PLAIN = RunFacts(steps=[ONE, ONE], start=START, layers=[], parameters={})
SHARDED = RunFacts(steps=[STEP, STEP], start=START, layers=[], parameters=ENDS)


def found(plain: RunFacts, sharded: RunFacts) -> tuple[int | None, str]:
    first = compare(plain, sharded, 1e-4).first
    assert first is not None
    return first.step, first.what


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (replace(STEP, losses=(1.001,)), "loss"),
        (replace(STEP, losses=(math.nan,)), "loss"),
        (replace(STEP, norm=5.1), "gradient norm"),
        (replace(STEP, norms={"a": 4.0, "b": 3.0}), "gradient of a"),
    ],
)
def test_first_difference_has_its_step_and_its_name(step, what):
    assert found(PLAIN, replace(SHARDED, steps=[STEP, step])) == (2, what)


def test_losses_and_gradients_that_are_not_numbers_in_both_runs_are_equal():
    lost = {"losses": (math.nan,), "norm": math.nan, "norms": {"a": math.nan, "b": 4.0}}
    plain = replace(PLAIN, steps=[replace(ONE, **lost)])
    assert compare(plain, replace(SHARDED, steps=[replace(STEP, **lost)]), 1e-4).first is None
    other = replace(STEP, losses=(math.nan,), norm=math.nan, norms={"a": math.nan, "b": 4.1})
    assert found(plain, replace(SHARDED, steps=[other])) == (1, "gradient of b")
    assert found(PLAIN, replace(SHARDED, steps=[replace(STEP, norms={"a": math.nan, "b": 4.0})])) == (
        1,
        "gradient of a",
    )


def test_losses_that_add_up_to_the_plain_one_are_equal_where_their_gradients_are():
    parts = replace(STEP, losses=(0.5,), totals=(1.0,))
    assert compare(PLAIN, replace(SHARDED, steps=[parts, STEP]), 1e-4).first is None
    assert found(PLAIN, replace(SHARDED, steps=[replace(parts, norm=2.5), STEP])) == (1, "loss")


def test_final_parameters_and_numbers_of_steps_are_compared():
    assert found(PLAIN, replace(SHARDED, parameters={"a": 0.0, "b": 0.1})) == (None, "parameter b")
    assert found(PLAIN, replace(SHARDED, parameters={"a": None, "b": 0.0})) == (None, "parameter a")
    assert found(PLAIN, replace(SHARDED, steps=[STEP])) == (2, "number of steps")


def test_parameter_whose_gradients_are_rounding_is_left_out():
    tiny = {"a": 5.0, "b": 1e-9}
    plain = replace(PLAIN, steps=[replace(ONE, norms=tiny)])
    sharded = replace(SHARDED, steps=[replace(STEP, norms=tiny)], parameters={"a": 0.0, "b": 0.1})
    verdict = compare(plain, sharded, 1e-4)
    assert (verdict.first, verdict.noise, verdict.parameters) == (None, ("b",), (1, 0.0))


@pytest.mark.parametrize(
    ("step", "layers", "dtype", "cause"),
    [
        (replace(STEP, losses=(0.5,), totals=(1.0,), norm=2.5), [], None, "loss-is-a-sum"),
        (replace(STEP, losses=(0.5,), contents=(5.0, 6.0)), [], None, "other-data"),
        (replace(STEP, losses=(0.5,), rows=(8, 8)), [], None, "batch-size"),
        (replace(STEP, losses=(0.5,), rows=(8, 8), contents=(7.0, 7.0)), [], None, "other-data"),
        (replace(STEP, losses=(0.5,), rows=(5, 5)), [], None, "batch-size"),
        (replace(STEP, losses=(0.6,), draws=True, random=("r", "s")), ["Dropout drop"], None, "randomness"),
        (replace(STEP, losses=(0.6,), draws=True), ["Dropout drop"], None, "unequal-means"),
        (replace(STEP, losses=(0.6,)), ["BatchNorm1d norm"], None, "batch-norm"),
        (replace(STEP, losses=(0.6,)), [], "bf16", "dtype"),
        (replace(STEP, norm=5.1), [], None, "gradients"),
        (replace(STEP, losses=(0.6,)), [], None, "unequal-means"),
    ],
)
def test_cause_is_the_first_whose_evidence_is_there(step, layers, dtype, cause):
    sharded = replace(SHARDED, steps=[step, STEP], layers=layers)
    first = compare(PLAIN, sharded, 1e-4).first
    assert first is not None
    assert find_cause(first, PLAIN, sharded, dtype).id == cause


def test_draws_are_no_cause_where_a_step_with_other_draws_was_equal():
    other = {"draws": True, "random": ("r", "s")}
    sharded = replace(SHARDED, steps=[replace(STEP, **other), replace(STEP, losses=(0.6,), **other)])
    first = compare(PLAIN, sharded, 1e-4).first
    assert first is not None
    assert find_cause(first, PLAIN, sharded, None).id == "unequal-means"


def test_what_the_run_said_comes_before_what_fits_without_proof():
    sharded = replace(SHARDED, steps=[replace(STEP, losses=(0.6,), draws=True)], told=["t.py:3: rows are mixed"])
    first = compare(PLAIN, sharded, 1e-4).first
    assert first is not None
    cause = find_cause(first, PLAIN, sharded, None)
    assert (cause.id, "t.py:3: rows are mixed" in cause.text) == ("told", True)


def test_shards_add_up_replicas_count_once_and_losses_are_averaged(tmp_path):
    for rank, loss in enumerate([1.0, 3.0]):
        gradients = {"shard": (8.0, True), "replica": (9.0, False)}
        step = {
            "losses": [loss],
            "gradients": gradients,
            "rows": 4,
            "content": 1.0,
            "draws": False,
            "line": "t.py:1",
        }
        record = {"steps": [step], "start": gradients, "layers": [], "parameters": {"shard": 0.0}}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(record))
    assert read_run(tmp_path, 0) is None
    run = read_run(tmp_path, 2)
    assert run is not None
    (step,) = run.steps
    assert (step.losses, step.totals, step.norm) == ((2.0,), (4.0,), 5.0)
    assert run.start == {"shard": 4.0, "replica": 3.0}

    record["steps"] *= 2
    (tmp_path / "rank1.json").write_text(json.dumps(record))
    with pytest.raises(LaunchError, match=r"different numbers of optimizer steps: \[1, 2\]"):
        read_run(tmp_path, 2)


def going(*by: float, end: float = 0.0) -> RunFacts:
    """Return a run whose losses are so far from 1, and whose parameter is so far from the plain one."""
    steps = [replace(ONE, losses=(1.0 - far,), totals=(2.0,)) for far in by]
    return RunFacts(steps=steps, start={"a": 1.0}, layers=[], parameters={"a": end})


EXACT = going(0, 0, 0)


def explained(sharded: RunFacts, changed: RunFacts) -> Cause | None:
    first = compare(EXACT, sharded, 1e-4).first
    assert first is not None
    return rounding(first, EXACT, sharded, changed)


@pytest.mark.parametrize(
    ("sharded", "changed"),
    [
        (going(1e-7, 1e-5, 2e-4), going(1e-7, 3e-6, 1e-5)),  # farther than its own reach
        (going(6e-5, 6e-5, 2e-4), going(1e-7, 3e-6, 1e-4)),  # early: a part is wrong from the beginning
        (going(1e-7, 1e-7, 1e-7, end=1e-2), going(1e-7, 1e-7, 1e-7, end=1e-6)),  # in a parameter alone
        (going(1e-7, 1e-5, 2e-4), going(1e-7)),  # it ended earlier
        (going(1e-7, 1e-5, float("nan")), going(1e-7, 1e-5, 1e-4)),
    ],
)
def test_what_goes_farther_than_rounding_is_something_else(sharded, changed):
    assert explained(sharded, changed) is None


def test_final_parameters_are_measured_by_their_own_reach():
    assert explained(going(1e-7, 1e-7, 1e-7, end=2e-4), going(1e-7, 1e-7, 1e-7, end=1e-4)) is not None


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
