"""What an optimizer trains and nobody has sharded is the same on all ranks, whoever sharded the rest."""

from pathlib import Path
from typing import Any

import pytest

from tests.scripts.conftest import Forks

WITH_ACCELERATE = """
import os
import torch
from accelerate import Accelerator
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.skip = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.skip(x) + torch.relu(self.up(x))

torch.manual_seed(int(os.environ.get("RANK", "0")))  # rank 0's values count
model = nn.Sequential(Block(), Block())
accelerator = Accelerator()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, FUSED)
inputs, wanted = (torch.randn(8, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
size = 8 // accelerator.num_processes
data = torch.utils.data.TensorDataset(inputs, wanted)
loader = torch.utils.data.DataLoader(data, batch_size=size)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(4):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
skips = [p.detach().flatten() for n, p in model.named_parameters() if "skip" in n]
assert all(type(skip) in (torch.Tensor, nn.Parameter) for skip in skips), skips
print(f"skip: {torch.cat(skips).norm().item():.5f}")
"""


@pytest.mark.parametrize(
    ("version", "efficient", "fused"), [(1, False, True), (1, True, False), (2, False, False), (2, True, True)]
)
def test_what_accelerate_ignores_is_trained_as_in_one_process(
    forks: Forks, tmp_path: Path, version: int, efficient: bool, fused: bool
) -> None:
    text = WITH_ACCELERATE.replace("FUSED", f"fused={fused}")
    plain = forks.passes(text, tmp_path / "plain")
    keys: dict[str, Any] = {
        "fsdp_config__fsdp_version": version,
        "fsdp_config__fsdp_ignored_modules": r".*skip$",
        "fsdp_config__fsdp_transformer_layer_cls_to_wrap": ("Block",),
        "fsdp_config__fsdp_cpu_ram_efficient_loading": efficient,
    }
    if version == 2 and not efficient:
        text = text.replace('os.environ.get("RANK", "0")', '"0"')  # nothing is sent
    run = forks.passes(text, tmp_path / "run", ranks=2, **keys)
    assert run.out[0] == run.out[1] == plain.out[0]
    assert "are not sharded (fsdp_ignored_modules): gradients are averaged" in run.err[0]


BY_HAND = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from fsdplaunch.runtime import sharding_watch

sharding_watch.COMPARED_EVERY = 2
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
fully_shard(model, ignored_params=set(model[1].parameters()))
parts = [model] if ONE else list(model)
optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
rows = torch.ones(2, 4)
for step in range(5):
    model(rows * CHANGE if torch.distributed.get_rank() == 1 and step == 1 else rows).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("one", [True, False], ids=["one optimizer", "an optimizer of its own"])
def test_copies_whose_gradients_nobody_averages_end_the_run_with_their_name(
    forks: Forks, tmp_path: Path, one: bool
) -> None:
    text = BY_HAND.replace("ONE", str(one)).replace("CHANGE", "2")
    run = forks.run(text, tmp_path / "run", ranks=2, launch__shard="explicit")
    assert run.codes == [1, 1], run.err
    assert "train.py:17: ranks train different values of 1.weight" in run.err[0]


def test_copies_that_differ_by_rounding_are_told_and_train_on(forks: Forks, tmp_path: Path) -> None:
    text = BY_HAND.replace("ONE", "True").replace("CHANGE", "(1 + 1e-5)")
    run = forks.passes(text, tmp_path / "run", ranks=2, launch__shard="explicit")
    assert run.err[0].count("ranks' copies of 1.weight differ by rounding") == 1


TWO_DTYPES = """
import torch
from accelerate import Accelerator
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8, dtype=torch.bfloat16)

model = nn.Sequential(Block(), Block())
Accelerator().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""


def test_a_block_of_two_dtypes_is_named_where_accelerate_prepares_it(forks: Forks, tmp_path: Path) -> None:
    blocks = {"fsdp_config__fsdp_transformer_layer_cls_to_wrap": ("Block",)}
    run = forks.run(TWO_DTYPES, tmp_path / "run", ranks=2, **blocks)
    assert run.codes == [1, 1]
    assert "train.py:12: 0 has 0.norm.bias in float32 and 0.up.bias in bfloat16" in run.err[0]


SCHEDULE = """
import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator()
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1, end_factor=0.1, total_iters=6)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
for _ in range(2):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
"""


def test_a_schedule_that_advances_once_for_each_worker_is_named_with_both_rates(
    forks: Forks, tmp_path: Path
) -> None:
    keys = {"fsdp_config__fsdp_auto_wrap_policy": "NO_WRAP"}
    run = forks.passes(SCHEDULE, tmp_path / "run", ranks=2, **keys)
    assert run.err[0].count("advances the schedule of learning rates 2 times for a step") == 1
    assert "train.py:14: " in run.err[0]
    assert "to 0.007, where one process advances it to 0.0085" in run.err[0]
