"""With the global batch kept: draws and rows that cannot be those of one process are told with their line."""

import functools
import random
import re
from pathlib import Path

import numpy
import torch

from tests.scripts.conftest import RANKS, Forks, lines

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
