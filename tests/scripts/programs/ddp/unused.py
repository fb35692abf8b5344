"""Heads that only some ranks use, optimizers built first, a copy of averaged weights, a model kept equal by hand."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(8, 2) for _ in range(4)])

    def forward(self, x, head):
        return self.heads[head](self.body(x))


model = Heads().to("cpu")
scale = nn.Linear(2, 2, bias=False)  # given to no wrapper: its gradients are averaged below
dist.broadcast(scale.weight.data, 0)
last = [{"params": model.heads.parameters()}, {"params": scale.parameters()}]
optimizer = torch.optim.AdamW(last, lr=1e-2, weight_decay=0.1)
factored = torch.optim.Adafactor(model.body.parameters(), lr=1e-2)
ddp = DistributedDataParallel(model, find_unused_parameters=True)
ema = copy.deepcopy(ddp.module).eval()
for step in range(5):
    with ddp.no_sync():
        loss = scale(ddp(torch.randn(4, 8), step % 2)).pow(2).mean()
        loss.backward()
    if step == 3:  # what was added up is dropped
        optimizer.zero_grad()
        ddp.module.body.zero_grad()
    loss = scale(ddp(torch.randn(4, 8), rank % 2 + 1)).pow(2).mean()
    loss.backward()
    dist.all_reduce(scale.weight.grad)
    scale.weight.grad /= dist.get_world_size()
    for each in (optimizer, factored):
        each.step()
        each.zero_grad()
    with torch.no_grad():
        for mean, now in zip(ema.parameters(), ddp.module.parameters()):
            mean.lerp_(now, 0.1)
    print(f"step {step} loss {loss.item():.7f} {scale.weight.norm().item():.7f}")
dist.barrier()
if int(os.environ["RANK"]) == 0:
    states = {"model": ddp, "optimizer": optimizer, "factored": factored, "ema": ema, "scale": scale}
    torch.save({name: each.state_dict() for name, each in states.items()}, "heads.pt")
