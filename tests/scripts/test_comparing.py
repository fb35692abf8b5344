"""`check --compare` finds equal what is equal, and names why a script computes something else over workers."""

from pathlib import Path

import pytest

from fsdplaunch.comparison import record
from fsdplaunch.comparison.causes import Cause, find_cause, may_be_rounding, rounding
from fsdplaunch.comparison.verdict import Difference, Verdict, compare, read_run
from fsdplaunch.config.environment import COMPARE_CHANGED, COMPARE_DIR, REHEARSAL_STEPS
from fsdplaunch.run_dir import COMPARED_CHANGED
from tests.scripts.conftest import Forks

SCRIPT = Path(__file__).with_name("comparing.py")
STEPS = 3


def compared(
    forks: Forks, folder: Path, script: Path, *arguments: str, **keys: object
) -> tuple[Verdict, Cause | None]:
    """Run a script in one process and over two workers, and compare."""
    records = folder / "records"
    records.mkdir()
    environ = {COMPARE_DIR: str(records), REHEARSAL_STEPS: str(STEPS)}
    recorder = Path(record.__file__)
    forks.passes(recorder, folder / "one", str(script), *arguments, environ=environ)
    keys = {"launch__keep_global_batch": True} | keys
    forks.passes(script, folder / "two", *arguments, ranks=2, environ=environ, **keys)
    plain, sharded = read_run(records, 0), read_run(records, 2)
    assert plain is not None
    assert sharded is not None
    assert len(plain.steps) >= STEPS  # of the optimizer that steps most
    verdict = compare(plain, sharded, 1e-4)
    cause = find_cause(verdict.first, plain, sharded, keys.get("mixed_precision")) if verdict.first else None
    return verdict, cause


def as_rounding(forks: Forks, folder: Path, first: Difference, *arguments: str) -> Cause | None:
    """Run a script once more, from weights changed in their last digits; return rounding or None."""
    records = folder / "records"
    environ = {COMPARE_DIR: str(records), REHEARSAL_STEPS: str(STEPS), COMPARE_CHANGED: "1"}
    forks.passes(Path(record.__file__), folder / "three", str(SCRIPT), *arguments, environ=environ)
    plain, sharded, changed = read_run(records, 0), read_run(records, 2), read_run(records, 0, COMPARED_CHANGED)
    assert plain is not None
    assert sharded is not None
    assert changed is not None
    assert plain.steps != changed.steps
    return rounding(first, plain, sharded, changed)


@pytest.mark.parametrize("modes", [("batch-norm", "optimizer-each"), ("padding", "full-gradients")])
def test_what_is_equal_is_found_equal(forks, tmp_path, modes):
    verdict, _ = compared(forks, tmp_path, SCRIPT, *modes)
    assert verdict.first is None
    assert verdict.largest < 1e-4
    assert verdict.parameters[0] == 16
    assert verdict.parameters[1] < 1e-4


@pytest.mark.parametrize(
    ("mode", "keys", "step", "what"),
    [
        ("initial-weights", {}, 0, "initial "),
        ("randomness", {}, 1, "loss"),
        ("other-data", {}, 1, "loss"),
        ("batch-size", {"launch__keep_global_batch": False}, 1, "loss"),
        (
            "dtype",
            {"mixed_precision": "bf16", "precision__output": "fp32"},
            1,
            "loss",
        ),  # torch 2.11: one dtype per loss
    ],
)
def test_difference_is_named_with_its_step_and_its_cause(forks, tmp_path, mode, keys, step, what):
    verdict, cause = compared(forks, tmp_path, SCRIPT, mode, **keys)
    assert verdict.first is not None
    assert (verdict.first.step, cause.id) == (step, mode)
    assert verdict.first.what.startswith(what)


OWN_UPDATES = """
import torch
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to("cpu")
for x in DataLoader(torch.randn(32, 4), batch_size=8):
    model.zero_grad()
    model(x).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
"""


def test_where_no_optimizer_is_torchs_each_backward_is_a_step(forks, tmp_path):
    (tmp_path / "train.py").write_text(OWN_UPDATES)
    verdict, _ = compared(forks, tmp_path, tmp_path / "train.py")
    assert verdict.first is None
    assert verdict.parameters[0] == 4


def test_rounding_that_grows_is_told_from_another_computation(forks, tmp_path):
    verdict, cause = compared(forks, tmp_path, SCRIPT, "rounding")
    assert verdict.first is not None
    assert cause is not None
    assert may_be_rounding(verdict.first, cause)
    found = as_rounding(forks, tmp_path, verdict.first, "rounding")
    assert found is not None
    assert found.id == "rounding"
