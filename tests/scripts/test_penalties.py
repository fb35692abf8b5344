"""Penalties and statistics that a script computes from sharded parameters are those of the full tensors."""

from pathlib import Path
from typing import Any

import pytest

from tests.scripts.conftest import Forks, Run

PENALTIES = """
import copy, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

def divide_batches():
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(TensorDataset(torch.randn(32, 6)), batch_size=8):
        optimizer.zero_grad()
        (model(x).pow(2).mean() + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())).backward()
        optimizer.step()
    print(*(f"{p.pow(2).sum().item():.6f}" for p in model.parameters()))

def train(rows, accumulate):
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, rows))
    model[0].weight.requires_grad_(False)
    model = model.to("cpu")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.randn(16, 6)
    for step in range(2 * accumulate):
        loss = F.mse_loss(model(x), x[:, :1].expand(16, rows))
        loss = loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters()) + 1e-2 * model[0].bias.abs().sum()
        loss = loss + 3 * sum(F.mse_loss(p, before[name]) for name, p in model.named_parameters())
        loss = loss + 1e-2 * sum(torch.amax(p) + p.abs().max() + p.norm(float("inf")) for p in model.parameters())
        loss = loss + 1e-2 * sum(p.amax(dim=0).sum() for p in model.parameters())
        for p in model.parameters():
            loss += 1e-2 * torch.norm(p) + 1e-2 * torch.sum(torch.abs(p))
        (loss / accumulate).backward()
        if (step + 1) % accumulate == 0:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            largest = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
            print(f"{loss.item():.6f} {norm:.6f} {largest:.6f}")
            optimizer.step()
            optimizer.zero_grad()
            model[0].weight.requires_grad_(True)
    for p in model.parameters():
        print(f"{p.sum():.6f} {p.max():.6f} {torch.min(p).item():.6f} {p.norm(float('inf')):.6f} {p.mean():.6f}")
    weight = model[2].weight
    print(f"{weight.norm(dim=0).sum():.6f} {F.smooth_l1_loss(weight, weight * 2).item():.6f}")
    (weight.std() + (weight.sum(0) + 1).pow(2).sum()).backward()
    print(f"{weight.std():.6f} {weight.argmax().item()} {weight.grad.norm():.6f} {weight.grad.mean():.6f}")

def convolve_weights():
    torch.manual_seed(6)
    convolutions = nn.Conv1d(4, 6, 3, padding=1), nn.Conv1d(6, 6, 3)
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(12, 2)).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4, 4)
    for step in range(3):
        kernel = model[1].weight
        apart = F.conv1d(kernel, kernel, padding=2) - 1  # orthogonal convolutions
        low = F.conv_transpose1d(model[1].weight, model[0].weight, stride=2)
        loss = model(x).pow(2).mean() + 1e-2 * apart.pow(2).sum() + 1e-3 * low.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{loss.item():.6f}", *(f"{p.pow(2).sum().item():.6f}" for p in model.parameters()))
    with torch.no_grad():
        a, b = model[3].weight.view(4, 6), model[0].weight.view(18, 4)[:, :2]  # merged as loralib does
        model[1].weight.data += F.conv1d(a[None], b[..., None], groups=2).view(6, 6, 3)
    print(f"{model[1].weight.pow(2).sum().item():.6f}")

def average_of_weights_copied_before(rows):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, rows))
    slow = copy.deepcopy(model).requires_grad_(False)
    before = [torch.rand(p.shape) for p in model.parameters()]
    model.to("cpu")
    slow.to("cpu")
    params, averages = list(model.parameters()), list(slow.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(2):
        loss = model(torch.ones(4, 6)).pow(2).mean()
        loss = loss + sum((a * (p - b) ** 2).sum() + (p * a).sum() for a, p, b in zip(before, params, averages))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, a, b in zip(params, averages, before):
                a.mul_(0.5).add_(p.data, alpha=0.5)
                a.lerp_(p, 0.1)
                a.copy_(a * 0.9 + p * 0.1)
                a.data = a.data * 0.9 + p.data * 0.1
                a.data = p.data * 0.1 + a.data * 0.9
                b.mul_(0.9).add_(p.grad)
                p.mul_(b.sign())
                p.data.add_(b, alpha=0.01)
            torch._foreach_lerp_(averages, params, 0.1)
    print(*(f"{p.sum():.6f} {a.sum():.6f} {a.norm():.6f}" for p, a in zip(params, averages)))

average_of_weights_copied_before(1)
average_of_weights_copied_before(4)
train(1, accumulate=1)
train(2, accumulate=2)
train(5, accumulate=1)
convolve_weights()
divide_batches()
"""

HYBRID = {f"parallelism_config__parallelism_config_dp_{kind}_size": 2 for kind in ("replicate", "shard")}
"""Rows and columns of ranks, of which each row holds a full model."""


@pytest.fixture(scope="module")
def plain(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the script as one process."""
    folder = tmp_path_factory.mktemp("penalties")
    script = folder / "train.py"
    script.write_text(PENALTIES)
    done = forks.run(script, folder / "plain")
    assert done.codes == [0], done.err
    return done


@pytest.mark.parametrize(("ranks", "keys"), [(2, {}), (4, {}), (4, HYBRID)], ids=["2", "4", "2x2"])
def test_penalties_on_parameters_with_fewer_rows_than_ranks_train_alike(
    forks: Forks, plain: Run, tmp_path: Path, ranks: int, keys: dict[str, Any]
) -> None:
    script = plain.folder.parent / "train.py"
    many = forks.run(script, tmp_path / "many", ranks=ranks, launch__keep_global_batch=True, **keys)
    assert many.codes == [0] * ranks, many.err
    expected = [float(number) for number in plain.out[0].split()]
    for out in many.out:
        assert [float(number) for number in out.split()] == pytest.approx(expected, abs=1e-5)
