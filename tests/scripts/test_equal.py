"""What one process computes, over several ranks with the global batch kept; and what cannot be equal is told."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdplaunch.runtime.torch_internals.graphs.graph_nodes import takes_partial_passes
from tests.needs import needs
from tests.scripts.conftest import EQUAL, RANKS, Forks, Run, lines

NUMBER = re.compile(r"-?\d+\.\d+")


@pytest.fixture(scope="module")
def runs(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Run, Run]]:
    """Run a script as plain python and over two ranks, once for all tests."""

    @cache
    def run(name: str) -> tuple[Run, Run]:
        folder = tmp_path_factory.mktemp(name)
        script, ranks = EQUAL / f"{name}.py", str(RANKS)
        plain = forks.run(script, folder / "plain", ranks)
        assert plain.codes == [0], plain.err
        many = forks.run(script, folder / "many", ranks, ranks=RANKS, launch__keep_global_batch=True)
        assert many.codes == [0] * RANKS, many.err
        return plain, many

    return run


@pytest.mark.parametrize(
    "name",
    [
        *("sums", "randomness", "samplers", "penalties", "optimizers", "operators", "batches", "references"),
        *("mixtures", "inference", "decisions", "written", "recomputed", "objects"),
    ],
)
def test_training_is_that_of_one_process(runs: Callable[[str], tuple[Run, Run]], name: str) -> None:
    plain, many = runs(name)
    expected = lines(plain.out[0])
    assert len(expected) >= 6
    for other in ("root", "contrast", "centred", "table", "normed", "mistaken", "over loss", "of loss"):
        expected.pop(other, None)  # told, below
    for out in many.out:
        found = lines(out)
        for each, numbers in expected.items():
            assert found[each] == pytest.approx(numbers, abs=1e-5), each


def test_reductions_that_are_no_means_are_named_with_their_line(runs: Callable[[str], tuple[Run, Run]]) -> None:
    plain, many = runs("sums")
    names = list(lines(plain.out[0]))
    told = many.err[0]
    line = {name: f"losses.py:{number + 1}: " for number, name in enumerate(names)}
    sums = {name for name in names if f"{line[name]}the loss is a sum over the batch" in told}
    assert sums == {
        *("sum", "sum over 16", "mean of sums over rows", "cross entropy sum", "sum and mean", "sum and penalty"),
        "an eighth of a sum",
    }
    counted = {name for name in names if f"{line[name]}each rank's mean is over a count of its own" in told}
    assert counted == {
        *("padded", "weighted", "masked", "importance", "few", "most", "padded later", "counted later"),
    }
    missing = {name for name in names if f"{line[name]}a term of the loss (M" in told}
    assert missing == {"selected", "added"}
    assert f"{line['root']}the loss is no plain sum or mean over the batch (Sqrt)" in told
    assert told.count("no plain sum or mean") == 1
    mixed = {name for name in names if f"{line[name]}the loss compares rows of the batch with each other" in told}
    assert mixed == ({"contrast"} | ({"normed", "centred", "table"} if takes_partial_passes() else set()))


@needs("torch", "2.11", "multiplies no rows by a turned parameter outside of its model")
def test_losses_by_which_parameters_are_multiplied_are_told_unless_they_are_linear(
    runs: Callable[[str], tuple[Run, Run]],
) -> None:
    told = runs("mixtures")[1].err[0]
    assert told.count("no plain sum or mean over the batch (Div)") == 1
    assert told.count("the loss compares rows of the batch with each other") == 1
    assert told.count("the loss is a sum over the batch") == 1


@pytest.mark.parametrize(
    "change",
    [
        "w.grad = w.grad * share",
        "w.grad.mul_(share)",
        "w.data.sub_(w.grad, alpha=share.item())",
        "w.grad = w.grad.minimum(share)",
    ],
)
def test_shards_that_are_scaled_by_a_ranks_own_loss_are_told_before_the_first_step(
    forks: Forks, tmp_path: Path, change: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(OWN_NUMBER.format(change=change))
    told = {}
    for rows in (True, False):
        done = forks.run(script, tmp_path / str(rows), str(rows), ranks=2, launch__keep_global_batch=True)
        assert done.codes == [0, 0], done.err
        told[rows] = "is computed with a sharded parameter or gradient" in done.err[0].partition("stepping")[0]
    assert told == {True: True, False: False}  # where all ranks have the same rows there is nothing to tell


OWN_NUMBER = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(5, 3).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, w = torch.randn(8, 5), model.weight
(x,) = next(iter(DataLoader(TensorDataset(inputs), batch_size=8))) if sys.argv[1] == "True" else (inputs,)
loss = model(x).pow(2).mean()
share = loss.detach().clone()
loss.backward()
with torch.no_grad():
    {change}
optimizer.register_step_post_hook(lambda *_: print("stepping", file=sys.stderr, flush=True))
optimizer.step()
"""


def test_noise_of_parameters_is_not_taken_for_that_of_rows(runs: Callable[[str], tuple[Run, Run]]) -> None:
    assert "buffer noise" not in runs("randomness")[1].err[0]


def test_transforms_of_models_are_taken_for_their_outputs(runs: Callable[[str], tuple[Run, Run]]) -> None:
    told = runs("penalties")[1].err[0]
    program = (EQUAL / "penalties.py").read_text()
    line = program.split("0.1 * term(model", maxsplit=1)[0].count("\n") + 1
    assert f"penalties.py:{line}: " not in told


def test_parameters_that_a_script_holds_hold_no_full_tensor(runs: Callable[[str], tuple[Run, Run]]) -> None:
    assert all("0 elements held" in err.splitlines() for err in runs("references")[1].err)


def test_a_model_that_is_mostly_in_no_block_is_gathered_as_one_unit(
    runs: Callable[[str], tuple[Run, Run]],
) -> None:
    told = runs("batches")[1].err
    assert "fsdplaunch: most of Wide is in no repeated block: it is gathered as one unit" in told[0]
    assert not any("returned a view tensor" in err for err in told)  # what torch warns of is mended


def test_parameters_of_two_optimizers_are_told_where_the_first_exchanged_them(
    runs: Callable[[str], tuple[Run, Run]],
) -> None:
    told = [
        line for line in runs("optimizers")[1].err[0].splitlines() if "parameters that SGD has as well" in line
    ]
    assert len(told) == 1
    assert "optimizers.py:103: Adam gets 2 parameters" in told[0]
    assert "exchanged for shards at optimizers.py:102" in told[0]


@pytest.mark.parametrize(("set_to", "factor"), [("sum", 2.0), ("mean", 1.0)])
def test_reduction_that_is_set_holds_for_every_loss(
    forks: Forks, tmp_path: Path, set_to: str, factor: float
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SET_REDUCTION)
    keys: dict[str, Any] = {"launch__keep_global_batch": True, "launch__loss_reduction": set_to}
    done = forks.run(script, tmp_path / "many", ranks=RANKS, **keys)
    assert done.codes == [0] * RANKS, done.err
    assert [float(number) for number in NUMBER.findall(done.out[0])] == pytest.approx([factor], abs=1e-6)
    assert "the loss is" not in done.err[0]


SET_REDUCTION = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(1, 1, bias=False).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for x in DataLoader(torch.ones(4, 1), batch_size=4):
    model(x).mean().backward()
    print(f"{model.weight.grad.sum().item():.6f}")
"""


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


def test_failed_save_leaves_what_the_handle_had(runs: Callable[[str], tuple[Run, Run]]) -> None:
    _, many = runs("modules")
    assert (many.folder / "failed.pt").read_bytes() == b"before"


def test_unseeded_generators_begin_alike_on_all_ranks(runs: Callable[[str], tuple[Run, Run]]) -> None:
    _, many = runs("samplers")
    first, second = (out.splitlines()[0] for out in many.out)
    assert first.startswith("unseeded 0.")
    assert first == second
    assert "drawn" not in many.err[0]


def test_optimizers_that_need_full_tensors_are_named(runs: Callable[[str], tuple[Run, Run]]) -> None:
    _, many = runs("optimizers")
    assert re.search(r"optimizers.py:\d+: LBFGS keeps full gradients on every rank", many.err[0])
    assert many.err[0].count("LBFGS keeps full gradients on every rank") == 2
    assert many.err[0].count("Adafactor needs full tensors: each parameter is gathered for its step") == 2
    muon = hasattr(torch.optim, "Muon")
    assert many.err[0].count("Muon needs full tensors") == muon
    assert many.err[0].count("needs full tensors") == 2 + muon  # Rprop steps on local shards
