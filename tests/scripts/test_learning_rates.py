"""Ranks train by one learning rate, whatever each decides by the loss of its own rows."""

from pathlib import Path

from tests.scripts.conftest import Forks

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 6))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
def train(decide):
    for number, (rows,) in enumerate(DataLoader(data, batch_size=4, shuffle=True)):
        loss = (model(rows) - rows[:, :1] ** 2).pow(2).mean()
        optimizer.zero_grad()
        before = loss.item()
        loss.backward()
        optimizer.step()
        decide(number, before, loss.item())
"""
PLATEAU = """
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
train(lambda number, before, after: schedule.step(after))
train(lambda number, before, after: schedule.step(number))
print("rate", optimizer.param_groups[0]["lr"])
"""
BY_HAND = """
rank = torch.distributed.get_rank()
def lower(number, before, after):
    if number == 2 and rank == 1:
        optimizer.param_groups[0]["lr"] *= 0.5
train(lower)
"""


def test_plateau_of_ranks_own_losses_is_decided_by_their_mean_and_told(forks: Forks, tmp_path: Path) -> None:
    done = forks.passes(HEAD + PLATEAU, tmp_path / "run", ranks=2)
    assert done.out[0] == done.out[1]
    assert "rate 0.5\n" not in done.out[0]
    told = [line for line in done.err[0].splitlines() if "ReduceLROnPlateau gets" in line]
    assert len(told) == 1
    assert "train.py:19: " in told[0]


def test_rates_that_differ_with_the_global_batch_kept_end_the_run(forks: Forks, tmp_path: Path) -> None:
    done = forks.run(HEAD + BY_HAND, tmp_path / "run", ranks=2, launch__keep_global_batch=True)
    assert done.codes == [1, 1]
    for err in done.err:
        assert "ranks step with different learning rates: [0.5] on rank 0 and [0.25] on rank 1" in err
