"""What one process computes, over several ranks with the global batch kept; and what cannot be equal is told."""

import functools
import random
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fsdplaunch.runtime.torch_internals.graphs.graph_nodes import takes_partial_passes
from tests.needs import needs
from tests.scripts.conftest import RANKS, Forks, Run

EQUAL = Path(__file__).parent / "equal"
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


def lines(text: str) -> dict[str, list[float]]:
    """Return the numbers of each line by its name."""
    named = (line.split(":") for line in text.splitlines() if ": " in line)
    return {name: [float(number) for number in numbers.split()] for name, numbers in named}


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
    assert "optimizers.py:89: Adam gets 2 parameters" in told[0]
    assert "exchanged for shards at optimizers.py:88" in told[0]


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


REJECTED = """
import torch
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = torch.nn.Linear(4, 1).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x in DataLoader(torch.randn(16, 4).abs() * 20, batch_size=8, shuffle=True):
        model(torch.poisson(x)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {_}: {torch.rand(1).item():.6f}")
"""


def test_draws_by_what_each_row_has_are_told_and_later_draws_stay_alike(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(REJECTED)
    done = forks.run(script, tmp_path / "run", ranks=2, launch__keep_global_batch=True)
    assert done.codes == [0, 0], done.err
    assert lines(done.out[0]) == lines(done.out[1])
    assert done.err[0].count("train.py:9: poisson draws by a number that each row has of its own") == 1


DRAWN = """
import numpy, random, torch
from torch.utils.data import DataLoader, Dataset
class Items(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, number):
        return torch.ones(2) * number * random.random()
def init(worker):
    print("worker", worker, flush=True)
model = torch.nn.Linear(2, 1)
model.register_buffer("filter", torch.ones(4, 2))
model.to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for x in DataLoader(Items(), batch_size=8, num_workers=1, worker_init_fn=init):
    scales = [torch.rand(1) for row in x]
    jitter = [random.gauss(0, 1) for row in x]
    jitter = [numpy.random.normal() for row in x]
    once = random.random(), random.randint(0, len(x) * 2), numpy.random.rand()
    x = x + x[torch.randperm(len(x))]
    x = x + x.flip(0)
    x = x + x[numpy.random.permutation(len(x))]
    order = random.sample(range(len(x)), len(x))
    x = x * model.filter.flip(0)
    (model(x) * torch.cat(scales)).mean().backward()
    optimizer.step()
"""


CUT = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for x in DataLoader(torch.ones(16, 2), batch_size=8):
    for start in range(0, len(x), 2):
        model(x[start : start + 2]).mean().backward()
    for part in x.chunk(2):
        model(part).mean().backward()
    print(x[:3].mean(), x[0].mean(), x[:, :1].mean(), x[:, 1:].mean())
    adapts = x[: len(x) // 2]
    tests = x[len(x) // 2 :]
    labelled, unlabelled = x.chunk(2)
    first, rest = torch.split(x, [1, len(x) - 1])
    upper, lower = torch.chunk(x, 2)
    all_but_first = x[5:]
    (model(adapts) - model(tests)).mean().backward()
    optimizer.step()
"""


def test_batches_that_are_cut_by_position_are_told_unless_all_parts_are_treated_alike(
    forks: Forks, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(CUT)
    done = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert done.codes == [0] * RANKS, done.err
    told = re.findall(r"train.py:(\d+): rows of the batch are taken by their position", done.err[0])
    lines = CUT.splitlines()
    assert [lines[int(number) - 1].split(" =")[0].strip() for number in told] == [
        *("tests", "labelled, unlabelled", "first, rest", "upper, lower", "all_but_first"),
    ]


SIZED = """
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(3, 1).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = 12
for (x,) in DataLoader(TensorDataset(torch.ones(48, 3)), batch_size=16):
    n = len(x)
    half = torch.randint(0, 10, (n // 2 + 1,))
    double = torch.randn(2 * x.size(0), 3)
    vectors = torch.stack([torch.randn(3) for _ in x])
    shares = torch.rand(3 * n).view(3, n)
    unrepeated = torch.multinomial(torch.ones(40), n)
    times = (torch.rand(1) + torch.arange(n)) / n
    spaced = torch.linspace(0, 1, steps=len(x))
    numbers = x[torch.arange(n), torch.arange(len(x)) % 3], torch.arange(3) / 3, torch.linspace(0, 1, 16)
    chosen = np.random.default_rng(0).choice(40, n, replace=False)
    fitting = torch.rand(n * 3), torch.multinomial(torch.ones(40), 3), torch.randint(0, 10, (len(x),))
    fitting = torch.rand(n, 3), torch.randn(other * 2, 3), torch.rand(2 * 3)
    (model(x + vectors) - 1).pow(2).mean().backward()
    optimizer.step()
"""


def test_draws_by_a_size_that_is_computed_of_the_rows_are_told(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SIZED)
    done = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert done.codes == [0] * RANKS, done.err
    told = re.findall(r"train.py:(\d+): \d+ random numbers are drawn (on|one) ", done.err[0])
    lines = SIZED.splitlines()
    assert [(lines[int(number) - 1].split(" =")[0].strip(), how) for number, how in told] == [
        *(("half", "on"), ("double", "on"), ("vectors", "one")),
    ]
    sentences = {
        "shares": "random numbers were drawn for the rows of shares",
        "unrepeated": "numbers are drawn for the batch's rows without replacement",
        "chosen": "numbers are chosen for the batch's rows without replacement",
        "times": "numbers for the batch's rows are made by their place",
        "spaced": "numbers for the batch's rows are made by their place",
    }
    for name, sentence in sentences.items():
        (number,) = (place for place, line in enumerate(lines, 1) if line.strip().startswith(f"{name} ="))
        assert done.err[0].count(f"train.py:{number}: {sentence}") == 1
    assert done.err[0].count("made by their place") == 2


CHOSEN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1)
    def forward(self, x):
        return self.last(self.drop(self.first(x)[x[:, 0] > 0]))
model = Net().to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    read = []
    for x, number in DataLoader(TensorDataset(torch.randn(48, 3), torch.arange(48)), batch_size=16, shuffle=True):
        model(x).pow(2).mean().backward()
        optimizer.step()
        read += number.tolist()
    print(f"{epoch}: " + " ".join(map(str, read)))
"""


def test_dropout_of_rows_that_each_rank_chooses_is_told_and_leaves_the_order_alike(
    forks: Forks, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(CHOSEN)
    done = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert done.codes == [0] * RANKS, done.err
    for epochs in zip(*(lines(out).values() for out in done.out), strict=True):
        assert sorted(number for read in epochs for number in read) == list(range(48))
    assert done.err[0].count("train.py:17: ranks have drawn unequal numbers of random numbers") == 1


BY_PARAMETERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader
model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
names = dict(model.named_parameters())
def loss(params):
    return torch.func.functional_call(model, params, (x,)).pow(2).mean()
for x in DataLoader(torch.ones(8, 4), batch_size=4):
    {gradient}
"""


@pytest.mark.parametrize(
    "gradient",
    [
        "torch.func.grad(loss)({name: value.detach() for name, value in names.items()})",
        "torch.autograd.grad(loss(names), names.values(), create_graph=True)",
    ],
)
def test_gradients_by_parameters_that_would_be_lost_are_errors_at_their_line(
    forks: Forks, tmp_path: Path, gradient: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(BY_PARAMETERS.format(gradient=gradient))
    done = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert all(done.codes)
    assert "for the parameters of a sharded model would lose gradients" in done.err[0]
    assert "train.py:11" in done.err[0]


SYNCHRONISED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
inputs = torch.randn(32, 4, 3)
model = nn.Sequential(nn.Conv1d(4, 4, 1, bias=False), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, 1))
model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for (x,) in DataLoader(TensorDataset(inputs), batch_size={rows}):
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    print(f"after: {{model(inputs).pow(2).mean().item():.6f}}")
"""


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kept", [True, False])
def test_normalisation_over_all_ranks_runs_on_the_cpu(
    forks: Forks, tmp_path: Path, precision: str, kept: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SYNCHRONISED.format(rows=8))
    plain = forks.run(script, tmp_path / "plain")
    script.write_text(SYNCHRONISED.format(rows=8 if kept else 8 // RANKS))
    keys: dict[str, Any] = {"launch__keep_global_batch": kept, "mixed_precision": precision}
    many = forks.run(script, tmp_path / "many", ranks=RANKS, **keys)
    assert many.codes == [0] * RANKS, many.err
    expected = lines(plain.out[0])["after"]
    assert lines(many.out[0])["after"] == pytest.approx(expected, rel=1e-5 if precision == "no" else 0.05)


OWN = """
import os, numpy, torch
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(os.getpid())
class Noise:
    def __init__(self):
        self.rng = numpy.random.default_rng(0)
    def __call__(self, item):
        return item + self.rng.random()
class Items(Dataset):
    transforms = [Noise()]
    def __len__(self):
        return 16
    def __getitem__(self, number):
        return self.transforms[0](torch.ones(2))
model = torch.nn.Linear(2, 1)
model.register_buffer("filter", torch.ones(4, 2))
model.to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for x in DataLoader(Items(), batch_size=2, shuffle=True):
    model(x).logsumexp(0).mean().backward()
    optimizer.step()
print(os.getpid(), torch.rand(3).sum().item())
"""


def test_generators_of_a_dataset_seeds_by_rank_and_losses_of_single_rows_are_told(
    forks: Forks, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(OWN)
    done = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert done.codes == [0] * RANKS, done.err
    assert done.err[0].count("items of the dataset are drawn at random") == 1
    seeds = [out.split()[0] for out in done.out]
    assert f"train.py:4: torch is seeded with {seeds[0]} here and {seeds[1]} on another rank" in done.err[0]
    line = OWN.split("logsumexp", maxsplit=1)[0].count("\n") + 1
    assert done.err[0].count(f"train.py:{line}: each rank has one row of the batch") == 1
    assert done.out[0].split()[1] == done.out[1].split()[1]  # from the first step on they draw alike


def test_generators_that_a_dataset_reaches_are_found() -> None:
    from fsdplaunch.runtime.auto.rng.own_generators import OwnGenerators

    of_closure, of_partial, order = random.Random(1), numpy.random.RandomState(2), torch.Generator()

    class Items:
        def __init__(self) -> None:
            self.random, self.rows = random, [torch.ones(2)] * 100
            self.transforms = {"flip": functools.partial(max, of_partial), "order": order}

        def __getitem__(self, _: int) -> float:
            return of_closure.random()

    items = Items()
    found = OwnGenerators(items, order=[order])
    assert {id(each) for each in found.found} == {id(of_closure), id(of_partial)}
    assert not found.drew()
    items[0]
    assert found.drew()
    assert not found.drew()


def test_draws_in_loader_processes_and_row_by_row_and_mixed_rows_are_told(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DRAWN)
    done = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert done.codes == [0] * RANKS, done.err
    assert done.out[0].count("worker 0") == 1  # the script's own function
    assert done.err[0].count("items of the dataset are drawn at random") == 1
    line = DRAWN.split("torch.rand", maxsplit=1)[0].count("\n") + 1
    for after in (0, 1, 2):
        assert done.err[0].count(f"train.py:{line + after}: 4 random numbers are drawn one by one") == 1
    assert done.err[0].count("are drawn one by one") == 3
    for after in (4, 5, 6, 7):
        assert done.err[0].count(f"train.py:{line + after}: rows of the batch are put into another order") == 1
    assert done.err[0].count("rows of the batch are put into another order") == 4


@pytest.mark.parametrize("keep", [True, False])
def test_same_rows_on_all_ranks_are_told_at_the_first_steps(forks: Forks, tmp_path: Path, keep: bool) -> None:
    plain = forks.run(EQUAL / "rows.py", tmp_path / "plain")
    many = forks.run(EQUAL / "rows.py", tmp_path / "many", ranks=RANKS, launch__keep_global_batch=keep)
    assert many.codes == [0] * RANKS, many.err
    assert many.err[0].count("rows.py:14: all 2 ranks compute the same rows, for no DataLoader divides them") == 1
    assert ("and as slow, until rows are shuffled again, which each rank does" in many.err[0]) == (not keep)
    assert many.losses() == pytest.approx(plain.losses(), abs=1e-5)


LATE = """
import torch
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train, valid = (DataLoader(torch.randn(rows, 4), batch_size=8) for rows in (32, 24))
for epoch in range(2):
    for x in train:
        model.train()
        with torch.no_grad():
            model(x)
        model(x).square().mean().backward()
        optimizer.step()
model.train()
for x in valid:
    model.eval()
    model(x)
for x in valid:
    model(x)
"""


def test_a_loader_begun_before_the_model_evaluates_is_told(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LATE)
    many = forks.run(tmp_path / "train.py", tmp_path / "many", ranks=RANKS)
    assert many.codes == [0] * RANKS, many.err
    told = "train.py:17: each rank evaluates its own share of the rows"
    assert many.err[0].count(told) == many.err[0].count("its own share of the rows") == 1


METRICS = {
    "torchmetrics/__init__.py": "",
    "torchmetrics/metric.py": """
import torch
import torch.distributed as dist
class Metric:  # of the shape of torchmetrics'
    def __init__(self):
        self.rows, self.update = torch.zeros(()), self._wrap_update(self.update)
    def _wrap_update(self, update):
        return update
    def update(self, rows):
        self.rows += len(rows)
    def sync(self):
        if dist.is_initialized():
            dist.all_reduce(self.rows)
    def compute(self):
        self.sync()
        return self.rows.item()
""",
    "ignite/__init__.py": "",
    "ignite/distributed.py": """
import torch.distributed as dist
def get_world_size():
    return dist.get_world_size() if dist.is_initialized() else 1
""",
    "ignite/metrics.py": """
import torch
import torch.distributed as dist
import ignite.distributed as idist
class Metric:  # of the shape of pytorch-ignite's
    def __init__(self):
        self.rows = torch.zeros(())
    def update(self, rows):
        self.rows += len(rows)
    def compute(self):
        if idist.get_world_size() > 1:
            dist.all_reduce(self.rows)
        return self.rows.item()
""",
    "train.py": """
import torch
from torch import nn
from torch.utils.data import DataLoader
from ignite import metrics as ignite_metrics
from torchmetrics.metric import Metric
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train, valid = (DataLoader(torch.randn(rows, 4), batch_size=8) for rows in (32, 24))
for epoch in range(2):
    model.train()
    seen, evaluated = [Metric(), ignite_metrics.Metric()], [Metric(), ignite_metrics.Metric()]
    for number, x in enumerate(train):
        model(x).square().mean().backward()
        optimizer.step()
        for metric in seen:
            metric.update(x)
        if number == 0:
            model.eval()
            with torch.no_grad():
                for rows in valid:
                    model(rows)
                    for metric in evaluated:
                        metric.update(rows)
            print("evaluated:", *(metric.compute() for metric in evaluated))
            model.train()
    print("trained:", *(metric.compute() for metric in seen))
""",
}


def test_metrics_that_libraries_add_up_over_ranks_count_each_row_once(forks: Forks, tmp_path: Path) -> None:
    for name, text in METRICS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    many = forks.run(tmp_path / "train.py", tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert many.codes == [0] * RANKS, many.err
    assert many.out == ["evaluated: 24.0 24.0\ntrained: 32.0 32.0\n" * 2] * RANKS


LOADERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
class Own(DataLoader):
    def __iter__(self):
        return self._get_iterator()
class Given:  # as fastai gives to torch's iterators
    def __init__(self, *args, **kwargs):
        self.loader = DataLoader(*args, **kwargs)
    def __getattr__(self, name):
        if name in ("loader", "batch_sampler"):
            raise AttributeError(name)
        return getattr(self.loader, name)
    def __iter__(self):
        return torch.utils.data.dataloader._SingleProcessDataLoaderIter(self)
torch.manual_seed(0)
rows = TensorDataset(torch.randn(32, 5), torch.randn(32, 4))
model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 4)).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for inputs, wanted in KIND(rows, batch_size=8, sampler=DistributedSampler(rows, num_replicas=1, rank=0)):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), wanted)
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.6f}")
"""


@pytest.mark.parametrize(
    ("kind", "named"), [("DataLoader", None), ("Own", "Own"), ("Given", "a loader of __main__")]
)
def test_a_sampler_for_one_replica_is_divided_and_a_loader_with_its_own_iter_is_told(
    forks: Forks, tmp_path: Path, kind: str, named: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOADERS.replace("KIND", kind))
    plain = forks.run(script, tmp_path / "plain")
    many = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert many.codes == [0] * RANKS, many.err
    assert ("batches of 4 on each of 2 ranks" in many.err[0]) == (named is None)
    told = f"train.py:24: all 2 ranks compute the same rows, for {named}, whose __iter__ is not DataLoader's"
    assert many.err[0].count(told) == many.err[0].count("compute the same rows") == (named is not None)
    assert many.losses() == pytest.approx(plain.losses(), abs=1e-5)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("loss.backward(create_graph=True)", "backward(create_graph=True)"),
        ("torch.autograd.grad(loss, list(model.parameters()), create_graph=True)", "torch.autograd.grad with"),
    ],
)
def test_second_derivatives_by_parameters_are_refused_at_their_line(
    forks: Forks, tmp_path: Path, call: str, what: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 1).to('cpu')\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1.0)\n"
        f"loss = model(torch.ones(2, 2)).pow(2).mean()\n{call}\n"
    )
    done = forks.run(script, tmp_path / "run", ranks=RANKS)
    assert done.codes == [1] * RANKS
    assert f"train.py:5: {what}" in done.err[0]
    assert "--num-processes 1 --shard off" in done.err[0]


TOLD = """
import torch
from fsdplaunch.runtime.auto.losses import exchange
from fsdplaunch.runtime.collectives import hang_detector
from torch.utils.data import DataLoader
exchange.NOTICE_SECONDS = exchange.CONFIRM_SECONDS = 0.5
hang_detector.STILL_SECONDS = 0.5
blocks = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()) for _ in range(3)]
model = torch.nn.Sequential(*blocks).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for write in (lambda p: p.numpy().fill(0), lambda p: p.storage().fill_(0)):
    try:
        write(model[0][0].weight.data)
    except ValueError as error:
        print(error)
for x in DataLoader(torch.tensor([[1.0, 1], [1, 1], [1, 1], [-1, 1], [-1, 1], [1, 1]]), batch_size=2):
    if (x > 0).all():
        model(x).mean().backward()
for x in DataLoader(torch.tensor([[1.0, 1], [1, 1], [1, 1], [-1, 1], [1, 1], [1, 1]]), batch_size=2):
    loss = model(x).mean()
    if (x > 0).all():
        loss.backward()
        optimizer.step()
"""


def test_writes_into_copies_and_passes_without_a_backward_on_some_ranks_are_told(
    forks: Forks, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TOLD)
    done = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert 1 in done.codes
    first, second = done.out[0].splitlines()[:2]
    assert "read-only" in first
    assert second.startswith("train.py:11: storage() of a sharded tensor")
    told = "train.py:22: backward is called on rank 0 only: rank 1 went on without one, to train.py:20"
    assert told in done.err[0]
    assert (
        done.err[0].count("train.py:18: rank 1 has drawn more batches than rank 0, as where it leaves some") == 1
    )


def test_graph_of_a_loss_tells_its_reductions() -> None:
    from fsdplaunch.runtime.auto.losses.graph import read_graph

    out = torch.nn.Linear(3, 5)(torch.randn(4, 3))

    def kinds(loss: torch.Tensor) -> list[str]:
        return [each.kind for each in read_graph(loss.grad_fn, {4}, 2).reductions]

    assert kinds(out.mean()) == ["mean"]
    assert kinds(out.pow(2).sum(1).mean() + 3 * out.sum()) == ["sum", "mean"]
    assert kinds(out.sum() / 8) == ["sum"]
    assert kinds(out.sum() / 20) == ["mean"]
    assert kinds(out.mean() * 4) == ["unknown"]
    assert kinds(out.mean().log() + out.max()) == ["unknown", "unknown"]
    assert kinds(out.sum(0).mean()) == ["sum"]
    weight = torch.nn.Parameter(torch.ones(()))
    assert kinds((-weight).exp() * out.mean() + weight) == ["mean"]
    assert kinds(1 - (out * 2).sum() / (out.exp().sum() + 1)) == ["unknown"]  # a Dice loss
    assert kinds(out.mean() * out.pow(2).mean()) == ["unknown"]


def test_what_mixes_rows_is_told_from_what_does_not() -> None:
    from fsdplaunch.runtime.auto.losses.row_mixing import is_by_row

    out = torch.randn(4, 3, 2, requires_grad=True)
    by_row = [
        out.softmax(1),
        out.sum(-1),
        out.transpose(1, 2),
        out.unsqueeze(-1),
        out.gather(2, out.argmin(2, True)),
    ]
    mixing = [out.softmax(0), out.mean(), out.permute(1, 0, 2), out[None], out[..., 0].T, torch.cdist(out, out)]
    assert [is_by_row(value.grad_fn) for value in (*by_row, *mixing)] == [True] * 5 + [False] * 6


def test_optimizers_that_need_full_tensors_are_named(runs: Callable[[str], tuple[Run, Run]]) -> None:
    _, many = runs("optimizers")
    assert re.search(r"optimizers.py:\d+: LBFGS keeps full gradients on every rank", many.err[0])
    assert many.err[0].count("LBFGS keeps full gradients on every rank") == 2
    assert many.err[0].count("Adafactor needs full tensors: each parameter is gathered for its step") == 2
    muon = hasattr(torch.optim, "Muon")
    assert many.err[0].count("Muon needs full tensors") == muon
    assert many.err[0].count("needs full tensors") == 3 + muon


ACCELERATED = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
inputs = torch.randn(32, 4)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(inputs), batch_size=8))
for (x,) in loader:
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f} rows {len(x)}")
"""


def test_accelerate_divides_the_batches_that_it_makes(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ACCELERATED)
    plain = forks.run(script, tmp_path / "plain")
    keys: dict[str, Any] = {"launch__keep_global_batch": True, "fsdp_config__fsdp_auto_wrap_policy": "NO_WRAP"}
    many = forks.run(script, tmp_path / "many", ranks=RANKS, **keys)
    assert many.codes == [0] * RANKS, many.err
    assert many.out[0].count("rows 4") == 4
    assert many.losses() == pytest.approx(plain.losses(), abs=1e-5)


def test_script_that_divides_its_batches_itself_cannot_have_them_kept(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "model = fully_shard(torch.nn.Linear(2, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1.0)\n"
        "other = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)\n"
    )
    done = forks.run(script, tmp_path / "run", ranks=RANKS, launch__keep_global_batch=True)
    assert done.codes == [1] * RANKS
    assert "keep_global_batch is set, and the script divides its batches itself" in done.err[0]
