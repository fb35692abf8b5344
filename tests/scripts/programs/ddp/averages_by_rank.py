"""A trainer of the shape of MAE, DeiT and ConvNeXt: seeds by rank, an average of weights that is copied before the
wrapper is built, and so begins as each rank's own; all in a function that has returned when rank 0 saves last."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DECAY = 0.8


@torch.no_grad()
def update(averages: list[nn.Module], model: nn.Module, step: int) -> None:
    """Average in the ways of timm's classes, and of others."""
    now = model.module.state_dict()
    for name, value in averages[0].state_dict().items():
        value.copy_(value * DECAY + (1.0 - DECAY) * now[name].detach())
    for name, value in averages[1].state_dict().items():
        value.copy_((1.0 - DECAY) * now[name] + value * DECAY)
    for mean, value in zip(averages[2].parameters(), model.module.parameters(), strict=True):
        mean.sub_((1.0 - DECAY) * (mean - value))
    for mean, value in zip(averages[3].parameters(), model.module.parameters(), strict=True):
        mean.data = value.data * (1.0 / (step + 2)) + mean.data * (1 - 1.0 / (step + 2))
    for mean, value in zip(averages[4].parameters(), model.parameters(), strict=True):
        mean.add_(value - mean, alpha=1.0 - DECAY)


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(100 + rank)
    net = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 3))
    net.to("cpu")
    averages = [copy.deepcopy(net) for _ in range(5)]
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.randn(4, 8)
    for step in range(4):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update(averages, model, step)
        print(f"step {step} loss {loss.item():.7f}", flush=True)
        for average in averages:
            print(f"average loss {average(x).pow(2).mean().item():.7f}", flush=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save({**state, "averages": [average.state_dict() for average in averages]}, "last.pt")


main()
