"""An ordinary script over ranks that split its layers and sequences computes and writes what one process does."""

from pathlib import Path
from typing import Any

import pytest

from tests.scripts.conftest import PROGRAMS, Forks
from tests.scripts.test_programs import assert_same_files

PLAN = {
    "transformer.h.*.attn.c_attn": "colwise_gather_output",
    "transformer.h.*.attn.c_proj": "rowwise_split_input",
    "transformer.h.*.mlp.0": "colwise",
    "transformer.h.*.mlp.2": "rowwise",
}
LAYERS: dict[str, Any] = {
    "parallelism_config__parallelism_config_tp_size": 2,
    "sharding__tensor_parallel_plan": PLAN,
}
SEQUENCES: dict[str, Any] = {"parallelism_config__parallelism_config_cp_size": 2}


def test_nano_gpt_with_split_layers_and_sequences_is_that_of_one_process(forks: Forks, tmp_path: Path) -> None:
    script = PROGRAMS / "nano_gpt.py"
    plain = forks.run(script, tmp_path / "plain")
    keys = LAYERS | SEQUENCES
    split = forks.passes(script, tmp_path / "split", ranks=4, launch__keep_global_batch=True, **keys)
    assert split.losses() == pytest.approx(plain.losses(), abs=1e-4)
    assert "layers split: 12 of 28 parameters over 2 ranks, by sharding.tensor_parallel_plan" in split.err[0]
    assert_same_files(plain.folder, split.folder)
    assert "sequences split: over 2 ranks inside the blocks" in split.err[0]


RANK_0_SAVES = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
model = DDP(nn.Sequential(*[Block() for _ in range(2)]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(16, 8))
for (x,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False)):
    loss = model(x).pow(2).mean()
    loss.backward()
    gradients = [value.grad for value in model.parameters()]
    whole = torch.cat([gradient.full_tensor().flatten() for gradient in gradients])
    for order in (1.0, float("inf")):
        norm = torch.nn.utils.get_total_norm(gradients, order)
        torch.testing.assert_close(norm, whole.norm(order))
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), float(norm) / 2, norm)
    torch.testing.assert_close(torch.nn.utils.get_total_norm(gradients, order), norm / 2)
    optimizer.step()
    optimizer.zero_grad()
full = {name: value.full_tensor() for name, value in model.module.named_parameters()}
torch.save(model.module, "model.pt")
if dist.get_rank() == 0:
    with open("model.pt", "rb") as file:
        assert b"fsdplaunch" not in file.read()
    whole = torch.load("model.pt", weights_only=False)
    assert all(torch.equal(value, full[name]) for name, value in whole.named_parameters())
    torch.save(model.module.state_dict(), "saved.pt")
    saved = torch.load("saved.pt")
    assert all(torch.equal(saved[name], value) for name, value in full.items())
    print("the same")
"""


def test_a_script_of_ranks_that_divides_data_by_rank_reads_alike_where_layers_are_split(
    forks: Forks, tmp_path: Path
) -> None:
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    keys = LAYERS | {"sharding__tensor_parallel_plan": plan}
    done = forks.passes(RANK_0_SAVES, tmp_path / "run", ranks=4, **keys)
    assert "the same" in done.out[0]
