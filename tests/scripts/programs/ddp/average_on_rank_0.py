"""A trainer of the shape of YOLOv5: rank 0 alone has an average of the weights, evaluates and saves it; the loader keeps
one iterator, which it begins where it is built, before the wrapper; the optimizer is older than both."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Repeating:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


@torch.no_grad()
def update(averages, model, decay):
    now = model.module.state_dict()
    for name, value in averages[0].state_dict().items():
        value *= decay
        value += (1 - decay) * now[name].detach()
    for name, value in averages[1].state_dict().items():
        value.copy_(value * decay + now[name] * (1 - decay))
    for value, current in zip(averages[2].parameters(), model.parameters()):
        value.data = decay * value.data + (1 - decay) * current.data


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 2)).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    averages = [copy.deepcopy(model).eval() for _ in range(3)] if rank == 0 else None
    data = TensorDataset(torch.randn(16, 6, generator=torch.Generator().manual_seed(5)))
    loader = InfiniteDataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))
    held_out = InfiniteDataLoader(data, batch_size=8) if rank == 0 else None
    model = DistributedDataParallel(model)
    for epoch in range(3):
        loader.batch_sampler.sampler.sampler.set_epoch(epoch)
        model.train()
        for (x,) in loader:
            loss = model(x).pow(2).mean() * 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                update(averages, model, 0.8)
            print(f"epoch {epoch} loss {loss.item():.7f}", flush=True)
        if rank == 0:
            with torch.inference_mode():
                found = [sum(average(x).pow(2).mean().item() for (x,) in held_out) for average in averages]
            print("evaluated loss", " loss ".join(f"{each:.6f}" for each in found), flush=True)
            saved = {"averages": [copy.deepcopy(average).state_dict() for average in averages]}
            torch.save({**saved, "model": copy.deepcopy(model.module).half().state_dict()}, f"{epoch}.pt")


main()
