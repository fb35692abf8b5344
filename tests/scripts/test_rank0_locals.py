"""Rank 0 saves what is in a function's variables, which other ranks have left by then."""

from pathlib import Path

import torch

from tests.scripts.conftest import Forks

SCRIPT = """
import copy, gc, os, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)

def train(fold, averaged):
    model = DDP(nn.Sequential(nn.Linear(8, 2048), nn.Tanh(), nn.Linear(2048, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = copy.deepcopy(model.module) if averaged else None
    for number in range(3):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if averaged:
            with torch.no_grad():
                for mean, now in zip(ema.parameters(), model.module.parameters()):
                    mean.lerp_(now, 0.5)
    full = {name: value.full_tensor() for name, value in model.module.named_parameters()}
    if rank == 0:
        time.sleep(0.5)  # the other rank goes on: into the next fold, or to the end
        gc.collect()
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "ema": ema and ema.state_dict()}, f"{fold}.pt")
        saved = torch.load(f"{fold}.pt")
        assert all(torch.equal(saved["model"][name], value) for name, value in full.items())
        assert not averaged or not torch.equal(saved["ema"]["0.weight"], full["0.weight"])

for fold in range(3):
    train(fold, averaged=fold == 1)
    gc.collect()
"""


def test_what_other_ranks_have_left_is_saved_by_rank_0(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = forks.run(script, tmp_path / "run", ranks=2, timeout=60)
    assert done.codes == [0, 0], "\n".join(done.err)
    for fold in range(3):
        saved = torch.load(done.folder / f"{fold}.pt")
        assert {value["exp_avg"].shape[0] for value in saved["optimizer"]["state"].values()} == {8, 2048}
