"""Of the shape of llm.c's train_gpt2.py with ZeRO: two groups, micro steps; of torch's tutorials: Join."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
raw = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
model = DistributedDataParallel(raw)
params = list(raw.parameters())
groups = [
    {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
    {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
]


def build():
    made = ZeroRedundancyOptimizer(**groups[0], optimizer_class=torch.optim.AdamW, lr=0.01, betas=(0.9, 0.95))
    made.add_param_group(groups[1])
    return made


def train(optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed + rank)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for micro_step in range(2):
            model.require_backward_grad_sync = micro_step == 1
            rows = torch.randn(4, 4, generator=generator)
            loss = (model(rows) - rows.flip(1)).pow(2).mean() / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        optimizer.step()
        print(f"rank {rank} loss {loss.item():.7f}")


optimizer = build()
assert isinstance(optimizer, ZeroRedundancyOptimizer) and len(optimizer.param_groups) == 2
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
train(optimizer, 3, seed=10)
scheduler.step()
optimizer.consolidate_state_dict(to=0)
if rank == 0:
    state = optimizer.state_dict()
    state["param_groups"] = [dict(sorted(group.items())) for group in state["param_groups"]]
    torch.save({"model": model.state_dict(), "optimizer": state}, "zero.pt")
dist.barrier()
resumed = build()
resumed.load_state_dict(torch.load("zero.pt")["optimizer"])
train(resumed, 2, seed=20)

with Join([model, resumed]):  # as many batches everywhere
    for _ in range(2):
        resumed.zero_grad()
        model(torch.full((2, 4), 0.1 * (rank + 1))).pow(2).mean().backward()
        resumed.step()
train(torch.optim.SGD(model.parameters(), lr=0.1), 3, seed=30)
if rank == 0:
    torch.save(raw.state_dict(), "last.pt")
dist.destroy_process_group()
