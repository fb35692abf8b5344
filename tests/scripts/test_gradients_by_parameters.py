"""Gradients by parameters, and graphs of losses: what would be lost or differ is refused or told at its line."""

from pathlib import Path
from typing import Any

import pytest

from tests.scripts.conftest import RANKS, Forks, Run, lines

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


TWICE = """
import torch
model = torch.nn.Linear(2, 1).to('cpu')
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loss = model(torch.ones(2, 2)).pow(2).mean()
{gradient}
"""
REFUSED = {
    "torch.func.grad(loss)({name: value.detach() for name, value in names.items()})": (
        BY_PARAMETERS,
        "train.py:11",
    ),
    "torch.autograd.grad(loss(names), names.values(), create_graph=True)": (BY_PARAMETERS, "train.py:11"),
    "loss.backward(create_graph=True)": (TWICE, "train.py:6: backward(create_graph=True)"),
    "torch.autograd.grad(loss, list(model.parameters()), create_graph=True)": (
        TWICE,
        "train.py:6: torch.autograd.grad with",
    ),
}


@pytest.fixture(scope="module")
def refused(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    texts = {gradient: text.replace("{gradient}", gradient) for gradient, (text, _) in REFUSED.items()}
    return forks.beside(tmp_path_factory.mktemp("refused"), texts, launch__keep_global_batch=True)


@pytest.mark.parametrize("gradient", REFUSED)
def test_gradients_by_parameters_that_would_be_lost_are_errors_at_their_line(
    refused: dict[str, Run], gradient: str
) -> None:
    for err in refused[gradient].err:
        assert REFUSED[gradient][1] in err
        assert "for the parameters of a sharded model would lose gradients" in err
        assert "--num-processes 1 --shard off" in err


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


@pytest.mark.parametrize(("precision", "kept"), [("no", True), ("bf16", False)])
def test_normalisation_over_all_ranks_runs_on_the_cpu(
    forks: Forks, tmp_path: Path, precision: str, kept: bool
) -> None:
    plain = forks.run(SYNCHRONISED.format(rows=8), tmp_path / "plain")
    text = SYNCHRONISED.format(rows=8 if kept else 8 // RANKS)
    keys: dict[str, Any] = {"launch__keep_global_batch": kept, "mixed_precision": precision}
    many = forks.passes(text, tmp_path / "many", ranks=RANKS, **keys)
    expected = lines(plain.out[0])["after"]
    assert lines(many.out[0])["after"] == pytest.approx(expected, rel=1e-5 if precision == "no" else 0.05)
