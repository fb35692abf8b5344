"""Ranks whose rows lead them another way through a model: told before shards of different blocks are joined."""

from pathlib import Path

import pytest

from tests.scripts.conftest import Forks

BEGINNING = """
import torch
from torch import nn

torch.manual_seed(0)
ranks = __import__("torch.distributed").distributed

def block():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

def train(model, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    rows = torch.randn(32, 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True)), 4)
    for _, (x, y) in zip(range(steps), loader):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("trained")
"""

EXPERTS = (
    BEGINNING
    + """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        left_out = self.left_out()
        for number, expert in enumerate(self.experts):
            if number != left_out:
                x = x + expert(x)
        return self.head(x)

class ByRank(Experts):
    def left_out(self):
        return {left_out}

train(ByRank())
"""
)

PARTS = (
    BEGINNING
    + """
class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.aside, self.head = block(), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        x = x + self.body(x)
        if {condition}:
            x = x + self.aside(x)
        return self.head(x)

train(Parts())
"""
)


@pytest.mark.parametrize(
    ("left_out", "found"),
    [
        ("ranks.get_rank()", "experts.1 of ByRank"),  # as many on both, of one size: torch would join them
        ("3 + ranks.get_rank()", "the end of ByRank after experts.2"),
    ],
)
def test_blocks_that_only_some_ranks_call_are_an_error_at_the_line(
    forks: Forks, tmp_path: Path, left_out: str, found: str
) -> None:
    done = forks.run(EXPERTS.replace("{left_out}", left_out), tmp_path / "run", ranks=2)
    assert done.codes != [0, 0]
    errors = [line for err in done.err for line in err.splitlines() if "ShardingError" in line]
    assert errors, done.err
    assert any(found in line and "train.py:" in line for line in errors)
    assert any("NO_WRAP" in err for err in done.err)
    assert "trained" not in "".join(done.out)


def test_ways_that_all_ranks_have_gone_before_are_no_leave_to_part(forks: Forks, tmp_path: Path) -> None:
    turns = "[9, 0, 1, (0, 1)[ranks.get_rank()]]"  # left out: none, one, another by both; then by each another one
    text = EXPERTS.replace("{left_out}", f"self.__dict__.setdefault('turns', {turns}).pop(0)")
    done = forks.run(text, tmp_path / "run", ranks=2)
    assert done.codes != [0, 0]
    assert any("ShardingError: train.py:" in err for err in done.err), done.err
    assert "trained" not in "".join(done.out)


def test_a_parameter_that_only_some_ranks_use_is_an_error_at_the_line(forks: Forks, tmp_path: Path) -> None:
    done = forks.run(PARTS.replace("{condition}", "ranks.get_rank()"), tmp_path / "run", ranks=2)
    assert done.codes != [0, 0]
    assert any(
        "ShardingError: train.py:" in err and "without a gradient of aside.weight" in err for err in done.err
    )
    assert "trained" not in "".join(done.out)


def test_what_all_ranks_leave_out_together_trains(forks: Forks, tmp_path: Path) -> None:
    texts = {
        "blocks": EXPERTS.replace("{left_out}", "int(torch.randint(5, ()))").replace("steps=4", "steps=8"),
        "a parameter": PARTS.replace("{condition}", "torch.rand(()) > 0.5").replace("steps=4", "steps=8"),
    }
    for name, run in forks.beside(tmp_path, texts, ranks=2, launch__keep_global_batch=True).items():
        assert run.out[0] == "trained\n", (name, run.err)
