"""Weights are changed by hand where an epoch begins (SwAV's prototypes, WGAN's clamping), after a save by all ranks."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
ddp = DDP(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)


@torch.no_grad()
def change(how: int) -> None:
    weight = ddp.module[2].weight
    if how == 0:
        weight.copy_(nn.functional.normalize(weight.data.clone(), dim=1))
    elif how == 1:
        for param in ddp.parameters():
            param.data.clamp_(-0.1, 0.1)
    elif how == 2:
        for param in ddp.parameters():
            param.data = param.data * 0.9
    else:
        torch._foreach_mul_(list(ddp.parameters()), 0.9)


rows = torch.randn(4, 8, 5)
for step in range(4):
    change((step + 2) % 4)
    loss = ddp(rows[step][rank::world]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sys.stdout.write(f"loss {loss.item():.6f}\n")
    if rank == 0:
        time.sleep(0.2)
    torch.save([ddp.state_dict(), optimizer.state_dict()], f"{step}.pt")
dist.destroy_process_group()
