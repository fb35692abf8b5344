"""A script for DistributedDataParallel whose rank 0 alone evaluates and saves after every epoch, and is late.

Nothing blocks the host of the other ranks, so that they run on through backward and step. Prints, for every save,
how far what it holds is from the weights that all ranks had at that step.
"""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()
if on_gpu:
    torch.cuda.set_device(rank % torch.cuda.device_count())
device = torch.device("cuda" if on_gpu else "cpu")


def train(model: nn.Module, ranks: range, save: bool) -> list[dict[str, torch.Tensor]]:
    """Train on the batches of some ranks together; return the state after every epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(256, 20), torch.randn(256, 1))
    loaders = []
    for each in ranks:
        sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=each, shuffle=False)
        loaders.append(DataLoader(data, batch_size=16, sampler=sampler))
    states = []
    for epoch in range(4):
        for batches in zip(*loaders, strict=True):
            x, y = (torch.cat(parts).to(device) for parts in zip(*batches, strict=True))
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not save:
            states.append({name: value.clone() for name, value in model.state_dict().items()})
        elif rank == 0:
            time.sleep(0.2)
            model.eval()
            with torch.no_grad():
                model(torch.ones(4, 20, device=device))
            model.train()
            torch.save(model.module.state_dict(), f"epoch{epoch}.pt")
            states.append(torch.load(f"epoch{epoch}.pt", map_location=device))
    return states


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)


alone = build()
saved = train(DistributedDataParallel(build()), range(rank, rank + 1), save=True)
if rank == 0:
    wanted = train(alone, range(dist.get_world_size()), save=False)
    far = [
        max(float((one[name] - other[name]).abs().max()) for name in one)
        for one, other in zip(saved, wanted, strict=True)
    ]
    print(json.dumps({"saves": len(saved), "far": far}))
dist.destroy_process_group()
