"""Losses of the first batches are computed again from the rows of all ranks; what is otherwise is told."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.scripts.conftest import RANKS, Forks

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
rows, classes = torch.randn(8 * RANKS, 5), torch.randint(0, 4, (8 * RANKS,))
rewards, weights = torch.randn(8 * RANKS), torch.tensor([1.0, 2.0, 0.5, 1.5])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale


model = Net()
old = [p.detach().clone() + 0.1 for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.no_grad():
    teacher = nn.Linear(5, 4)


def each(x, r):
    return (model(x) - x[:, :4]).pow(2).mean(1)


def chosen(x, y):
    return F.log_softmax(model(x), 1)[torch.arange(len(x)), y]


def without_gradients(values):
    with torch.no_grad():
        return values - values.mean()


def norms(name):
    grads = [p.grad.norm().item() for p in model.parameters()]
    print(f"{name}: {' '.join(f'{each:.9f}' for each in grads)}")
    optimizer.zero_grad()


x, y, r = next(iter(DataLoader(TensorDataset(rows, classes, rewards), batch_size=4 * RANKS)))
"""
EQUAL = {
    "mean": "each(x, r).mean()",
    "sum": "each(x, r).sum()",
    "sum of a sum": "F.mse_loss(model(x), x[:, :4], reduction='sum').mean()",
    "sum by rows": "each(x, r).sum() / len(x)",
    "sum by a number of rows": "each(x, r).sum() * (1 / x.shape[0])",
    "mean of elements": "each(x, r).view(x.size(0), 1).expand(-1, 3).mean()",
    "cross entropy": "F.cross_entropy(model(x), y, weight=weights, label_smoothing=0.1)",
    "divergence": "F.kl_div(F.log_softmax(model(x), 1), F.softmax(x[:, :4], 1), reduction='batchmean')",
    "one hot": "(model(x).softmax(1) - F.one_hot(y, 4)).pow(2).sum(1).mean()",
    "by place": "-chosen(x, y).mean()",
    "filled labels": "F.binary_cross_entropy_with_logits(model(x)[:, :1], torch.full((len(x), 1), 0.9))",
    "focal": "-(((1 - chosen(x, y).exp()) ** 2).detach() * chosen(x, y)).mean()",
    "rows with rewards": "-(chosen(x, y) * r).mean()",
    "rows by a constant": "-(chosen(x, y) * (r - 0.3)).mean()",
    "masked": "(each(x, r) * (r > 0)).sum() / (r > 0).sum()",
    "selected": "each(x, r)[r > 0].mean()",
    "masked by a number": "(each(x, r) * (r > 0)).sum() / (r > 0).sum().item()",
    "teacher": "F.mse_loss(model(x), teacher(x).detach())",
    "two means": "each(x, r).mean() + 0.1 * model(x).abs().mean()",
    "halves": "(each(x, r).mean() / 2)",
    "along features": "model(x).cumsum(1).logsumexp(1).mean()",
    "hinge": "F.relu(0.3 - chosen(x, y)).mean()",
    "own function": "torch.stack([each(x, r).mean(), model(x).mean()]).sum()",
}
TOLD = {
    "baseline": ("-(chosen(x, y) * (r - r.mean())).mean()", "mean at train.py:LINE is over each rank's own rows"),
    "read baseline": (
        "-(chosen(x, y) * (r - r.mean().item())).mean()",
        "item at train.py:LINE is over each rank's own",
    ),
    "apart": (
        "-(chosen(x, y) * without_gradients(r)).mean()",
        "mean at train.py:INSIDE is over each rank's own rows",
    ),
    "weights": (
        "(each(x, r) * r.exp() / r.exp().mean()).mean()",
        "mean at train.py:LINE is over each rank's own rows",
    ),
    "largest": ("(each(x, r) * r / r.max()).mean()", "max at train.py:LINE is over each rank's own rows"),
    "first row": ("each(x, r)[:1].mean()", "some rows count otherwise"),
    "every other row": ("each(x, r)[::3].mean()", "some rows count otherwise"),
    "own average": ("-(chosen(x, y) * (r - kept)).mean()", "sub at train.py:LINE is given each rank's own"),
}
PENALTIES = {
    "sum of squares": "each(x, r).mean() + 0.01 * sum(p.pow(2).sum() for p in model.parameters())",
    "sum of sizes": "each(x, r).mean() + 0.01 * sum(p.abs().sum() for p in model.parameters() if p.dim() > 1)",
    "norms": "each(x, r).mean() + 0.01 * sum(map(torch.norm, model.parameters()))",
    "norms together": "each(x, r).mean() + 0.01 * torch.stack([p.norm() for p in model.parameters()]).max()",
    "all parameters": "each(x, r).mean() + parameters_to_vector(model.parameters()).square().mean()",
    "orthogonal": "each(x, r).mean() + (model.last.weight @ model.last.weight.T - torch.eye(4)).square().sum()",
    "orthogonal columns": "each(x, r).mean() + (model.last.weight.T @ model.last.weight - torch.eye(7)).norm()",
    "largest of a parameter": "each(x, r).mean() + model.scale.max() + model.first.weight.amax(1).mean()",
    "distances of parameters": "each(x, r).mean() + torch.cdist(model.last.weight, model.last.weight).mean()",
    "elastic": "each(x, r).mean() + sum((p - q).pow(2).sum() for p, q in zip(model.parameters(), old))",
    "scaled by a parameter": "(each(x, r) * model.scale.exp().mean()).mean() / model.scale.detach().norm()",
}
"""Terms of parameters alone, which are the same on all ranks. Only the first four of one kind are looked at."""
KEPT = "kept = 0.9 * 0.2 + 0.1 * r.mean().item()"


ALL = {**EQUAL, **{name: expression for name, (expression, _) in TOLD.items()}}


def program(expressions: Mapping[str, str] = ALL) -> str:
    steps = [f"({expression}).backward(); norms({name!r})" for name, expression in expressions.items()]
    return HEAD.replace("RANKS", str(RANKS)) + "\n".join([KEPT, *steps]) + "\n"


@pytest.mark.parametrize("names", [list(PENALTIES)[i : i + 4] for i in range(0, len(PENALTIES), 4)], ids=str)
def test_penalties_on_parameters_are_equal_and_not_told(forks: Forks, tmp_path: Path, names: list[str]) -> None:
    _check_penalties(forks, tmp_path, names)


def test_penalties_on_parameters_that_stay_gathered_are_equal_and_not_told(forks: Forks, tmp_path: Path) -> None:
    names = ["sum of squares", "orthogonal", "orthogonal columns", "scaled by a parameter"]
    _check_penalties(forks, tmp_path, names, fsdp_config__fsdp_reshard_after_forward=False)


def _check_penalties(forks: Forks, tmp_path: Path, names: list[str], **keys: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(program({name: PENALTIES[name] for name in names}))
    plain = forks.run(script, tmp_path / "plain")
    many = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True, **keys)
    assert (plain.codes, many.codes) == ([0], [0] * RANKS), many.err
    assert [line for line in _lines(plain.out[0]) if line[0] in names] == _lines(many.out[0])
    assert len(_lines(many.out[0])) == len(names)
    assert "one process" not in many.err[0]


def test_gradients_are_those_of_one_process_or_told_with_the_cause(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(program())
    plain = forks.run(script, tmp_path / "plain")
    many = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert (plain.codes, many.codes) == ([0], [0] * RANKS), many.err
    expected, found = dict(_lines(plain.out[0])), dict(_lines(many.out[0]))
    assert {name for name, line in found.items() if line != expected[name]} <= TOLD.keys()
    assert {name for name, line in found.items() if line == expected[name]} == EQUAL.keys()
    numbered = list(enumerate(program().splitlines(), 1))
    inside = next(str(number) for number, line in numbered if "values - values.mean()" in line)
    told = {name: _told_of(many.err[0], number) for number, line in numbered for name in _names_in(line)}
    assert not [lines for name in EQUAL for lines in told[name] if "one process" in lines]
    for name, (_, cause) in TOLD.items():
        (text,) = told[name]
        assert "is not that of one process" in text or "is not what one process computes" in text
        line = text.partition("train.py:")[2].partition(":")[0]
        assert cause.replace("LINE", line).replace("INSIDE", inside) in text


def _names_in(line: str) -> list[str]:
    return [name for name in (*EQUAL, *TOLD) if line.endswith(f"norms({name!r})")]


def _told_of(err: str, number: int) -> list[str]:
    return [line for line in err.splitlines() if line.startswith(f"fsdplaunch: train.py:{number}: ")]


def _lines(out: str) -> list[tuple[str, str]]:
    return [(name, numbers) for name, _, numbers in (line.partition(": ") for line in out.splitlines())]


SIZES = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
rows, size = map(int, sys.argv[1:])
model = nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(TensorDataset(torch.randn(rows, 5), torch.randn(rows, 3)), batch_size=size):
    loss = (model(x) - y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{sum(p.sum() for p in model.parameters()).item():.5f}", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize(("rows", "size"), [(4, 1), (2 * RANKS + 1, RANKS)])
def test_batches_of_fewer_rows_than_ranks_are_each_ranks_and_told_before_the_first_step(
    forks: Forks, tmp_path: Path, rows: int, size: int
) -> None:
    script, given = tmp_path / "train.py", (str(rows), str(size))
    script.write_text(SIZES)
    plain = forks.run(script, tmp_path / "plain", *given)
    many = forks.run(script, tmp_path / "many", *given, ranks=RANKS, launch__keep_global_batch=True)
    assert (plain.codes, many.codes) == ([0], [0] * RANKS), many.err
    numbers = [float(line) for line in plain.err[0].splitlines()]
    lines = many.err[0].splitlines()
    steps = [place for place, line in enumerate(lines) if re.fullmatch(r"-?\d+\.\d+", line)]
    assert [float(lines[place]) for place in steps] == pytest.approx(numbers, abs=2e-5)
    (told,) = [place for place, line in enumerate(lines) if "a batch of 1" in line]
    assert told < steps[0] or size == 1  # with batches of 1 it is told at the first backward
