"""Gradients by parameters, and graphs of losses: what would be lost or differ is refused or told at its line."""

from pathlib import Path
from typing import Any

import pytest
import torch

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
