"""What a script reads of a loss after its backward is what one process has computed, its terms as well."""

from pathlib import Path

import torch

from tests.scripts.conftest import Forks, Run

SCRIPT = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
rows = torch.randn(32, 6)
rows[::4, 0] = rows[1::4, 0] = 1.0
rows[2::4, 0] = -1.0
model = nn.Linear(6, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

def halved(out, rows):
    loss = (out - rows).pow(2).mean()
    (loss / 2).backward()
    return [loss]
def scaled(out, rows):
    loss = (out - rows).abs().mean()
    scaler.scale(loss).backward()
    return [loss]
class Trainer:
    def attributes(self, out, rows):
        self.mean, self.large = (out - rows).pow(2).mean(), out.abs().sum()
        (self.mean + 0.01 * self.large).backward()
        return [self.mean, self.large]
def entries(out, rows):
    terms = {"mean": out.exp().mean(), "rows": out.pow(2).sum(1).mean()}
    sum(terms.values()).backward()
    return terms.values()
@dataclass
class Output:
    loss: torch.Tensor
def fields(out, rows):
    given = Output(out.sigmoid().mean())
    (given.loss / 4).backward()
    return [given.loss]
def sums(out, rows):
    summed, features = out.pow(2).sum(), out.abs().mean(0)
    (summed / len(rows) + features.sum()).backward()
    return [summed, features.max()]
def counted(out, rows):
    mask = rows[:, 0] > 0
    masked = (out.pow(2).sum(1) * mask).sum()
    each = masked / mask.sum()
    (0.1 * each).backward()
    return [masked, each]
def listed(out, rows):
    picked = out[rows[:, 0] > 0].exp().mean()
    losses = [picked, out.pow(2).mean()]
    weighted = 0.5 * picked
    (weighted + losses[1] / 2).backward()
    return [picked, weighted, losses[1]]

for batch, in DataLoader(TensorDataset(rows), batch_size=4):
    for compute in (halved, scaled, Trainer().attributes, entries, fields, sums, counted, listed):
        optimizer.zero_grad()
        values = compute(model(batch), batch)
        optimizer.step()
        print(compute.__name__, *(f"{value.item():.6f}" for value in values))
"""


def _numbers(run: Run) -> list[dict[str, list[float]]]:
    found = []
    for out in run.out:
        numbers: dict[str, list[float]] = {}
        for line in out.splitlines():
            name, *values = line.split()
            numbers.setdefault(name, []).extend(map(float, values))
        found.append(numbers)
    return found


def test_terms_and_factors_of_losses_have_the_values_of_one_process(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plain = forks.run(script, tmp_path / "plain")
    many = forks.run(script, tmp_path / "run", ranks=2, launch__keep_global_batch=True)
    assert (plain.codes, many.codes) == ([0], [0, 0]), many.err
    (wanted,) = _numbers(plain)
    assert len(wanted) == 8
    for found in _numbers(many):
        for name, values in wanted.items():
            torch.testing.assert_close(
                found[name], values, rtol=1e-5, atol=1e-5, msg=f"{name} {found[name]} {values}"
            )
