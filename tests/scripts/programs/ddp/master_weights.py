"""Lower precision by hand: copies of the weights in fp32 are stepped, and copied back into the model."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
first = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6)).bfloat16()
second = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).bfloat16()

# One flat tensor, before the wrapper is built, and then a tensor for each of the wrapped model's parameters.
flat_params = list(first.parameters())
flat = nn.Parameter(_flatten_dense_tensors([p.detach().float() for p in flat_params]))
ddp_first, ddp_second = DDP(first), DDP(second)
params = list(ddp_second.parameters())
masters = [nn.Parameter(p.detach().clone().float()) for p in params]
optimizers = [torch.optim.AdamW([flat], lr=0.05), torch.optim.AdamW(masters, lr=0.05)]

rows = torch.randn(4, 8, 5)
for step in range(4):
    loss = ddp_second(ddp_first(rows[step][rank::world].bfloat16())).float().pow(2).mean()
    (loss * 8).backward()
    flat.grad = _flatten_dense_tensors([p.grad.data.detach().float() for p in flat_params])
    flat.grad.mul_(1 / 8)
    for master, param in zip(masters, params, strict=True):
        master.grad = param.grad.float() / 8
    for optimizer in optimizers:
        optimizer.step()
    for param, value in zip(flat_params, _unflatten_dense_tensors(flat.detach(), tuple(flat_params)), strict=True):
        param.detach().copy_(value)
    for param, master in zip(params, masters, strict=True):
        param.data.copy_(master.data)
    for param in flat_params + params:
        param.grad.detach_()
        param.grad.zero_()
    sys.stdout.write(f"loss {loss.item():.6f}\n")
if rank == 0:
    torch.save({"flat": flat, "masters": masters, "model": second.state_dict()}, "masters.pt")
    torch.save([optimizer.state_dict() for optimizer in optimizers], "optimizers.pt")
dist.destroy_process_group()
