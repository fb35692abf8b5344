"""What one process computes, over several ranks with the global batch kept; and what cannot be equal is told."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.conftest import EQUAL, RANKS, Forks, Run, lines

NUMBER = re.compile(r"-?\d+\.\d+")


@pytest.fixture(scope="module")
def runs(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Run, Run]]:
    """Run a script as plain python and over two ranks, once for all tests."""

    @cache
    def run(name: str) -> tuple[Run, Run]:
        folder = tmp_path_factory.mktemp(name)
        script, ranks = EQUAL / f"{name}.py", str(RANKS)
        plain = forks.passes(script, folder / "plain", ranks)
        many = forks.passes(script, folder / "many", ranks, ranks=RANKS, launch__keep_global_batch=True)
        return plain, many

    return run


@pytest.mark.parametrize(
    "name",
    [
        *("sums", "randomness", "samplers", "penalties", "optimizers", "operators", "batches", "references"),
        *("mixtures", "inference", "decisions", "written", "recomputed", "objects", "one_row"),
    ],
)
def test_training_is_that_of_one_process(runs: Callable[[str], tuple[Run, Run]], name: str) -> None:
    plain, many = runs(name)
    expected = lines(plain.out[0])
    assert len(expected) >= 6
    expected.pop("mistaken", None)  # printed, below
    for out in many.out:
        found = lines(out)
        for each, numbers in expected.items():
            assert found[each] == pytest.approx(numbers, abs=1e-5), each


HYBRID = {f"parallelism_config__parallelism_config_dp_{kind}_size": 2 for kind in ("replicate", "shard")}
"""Rows and columns of ranks, of which each row holds a full model."""


@pytest.mark.parametrize("keys", [{}, HYBRID], ids=["4", "2x2"])
def test_parameters_with_fewer_rows_than_ranks_are_computed_with_alike(
    runs: Callable[[str], tuple[Run, Run]], forks: Forks, tmp_path: Path, keys: dict[str, Any]
) -> None:
    expected = lines(runs("operators")[0].out[0])
    many = forks.passes(EQUAL / "operators.py", tmp_path, "4", ranks=4, launch__keep_global_batch=True, **keys)
    for out in many.out:
        for name, numbers in lines(out).items():
            assert numbers == pytest.approx(expected[name], abs=1e-5), name


def test_parameters_that_a_script_holds_hold_no_full_tensor(runs: Callable[[str], tuple[Run, Run]]) -> None:
    assert all("0 elements held" in err.splitlines() for err in runs("references")[1].err)


def test_torch_warns_of_no_view_that_a_model_returns(runs: Callable[[str], tuple[Run, Run]]) -> None:
    told = runs("batches")[1].err
    assert not any("returned a view tensor" in err for err in told)  # what torch warns of is mended


def test_modules_are_those_of_the_script(runs: Callable[[str], tuple[Run, Run]]) -> None:
    plain, many = runs("modules")
    for out in many.out:
        for one, other in zip(plain.out[0].splitlines(), out.splitlines(), strict=True):
            assert NUMBER.sub("", one) == NUMBER.sub("", other)
            expected = [float(number) for number in NUMBER.findall(one)]
            assert [float(number) for number in NUMBER.findall(other)] == pytest.approx(expected, abs=2e-3)


LOADING = """
import sys
names = ("model.pt", "handle.pt", "with_step.pt", "block.pt")
model, same, with_step, block = (torch.load(name, weights_only=False) for name in names)
assert not any(name.startswith("fsdplaunch") for name in sys.modules)
x = torch.ones(2, 3, 4)
hidden = model.init_hidden(3)[:2]
print(*(m(x, hidden).sum().item() for m in (model, same, with_step["model"])), block(x).sum().item())
"""


def test_saved_module_is_loaded_without_this_package(runs: Callable[[str], tuple[Run, Run]]) -> None:
    plain, many = runs("modules")
    script = (EQUAL / "modules.py").read_text().split("def init(")[0] + LOADING
    outputs = []
    for run in (plain, many):
        done = subprocess.run([sys.executable, "-c", script], cwd=run.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append([float(number) for number in done.stdout.split()])
    assert outputs[1] == pytest.approx(outputs[0], abs=1e-4)


def test_unseeded_generators_begin_alike_on_all_ranks(runs: Callable[[str], tuple[Run, Run]]) -> None:
    _, many = runs("samplers")
    first, *others = (out.splitlines()[0] for out in many.out)
    assert first.startswith("unseeded 0.")
    assert others == [first] * len(others)
    assert "drawn" not in many.err[0]
