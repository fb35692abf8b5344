"""Gradients by parameters, and graphs of losses: what would be lost or differ is refused or told at its line."""

from pathlib import Path
from typing import Any

import pytest

from tests.scripts.conftest import RANKS, Forks, lines

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
