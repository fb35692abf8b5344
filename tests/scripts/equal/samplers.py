"""Samplers that are long, endless, weighted or the script's own, streams, and what is left unseeded."""

import itertools
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

unseeded = [random.random(), np.random.rand(), np.random.default_rng().random(), torch.seed()]
unseeded += [torch.Generator().initial_seed()]
unseeded += [np.random.RandomState().rand(), np.random.Generator(np.random.PCG64()).random()]
random.seed()
np.random.seed()
print("unseeded", *unseeded, random.random(), np.random.rand())

torch.manual_seed(0)
inputs, wanted = torch.randn(64, 5), torch.randn(64, 4)


class Endless(Sampler):
    def __iter__(self):
        generator = random.Random(3)
        while True:
            yield generator.randrange(64)


class EndlessBatches(Sampler):
    def __iter__(self):
        while True:
            yield [int(i) for i in torch.randint(0, 64, (8,))]


class Stream(IterableDataset):
    def __iter__(self):
        for i in itertools.count():
            yield inputs[i % 64], wanted[i % 64]


class MadeBatches(IterableDataset):
    def __iter__(self):
        for start in range(0, 64, 8):
            yield inputs[start : start + 8] + 0.1 * torch.randn(8, 5), wanted[start : start + 8]


class MappedBatches(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        rows = slice(8 * number, 8 * number + 8)
        return {"x": inputs[rows], "y": wanted[rows].numpy(), "names": [str(row) for row in range(8)], "part": "a"}


class Repeated:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class MultiEpochsLoader(DataLoader):
    """Of the shape of timm's and YOLOv5's: one iterator for all epochs, and the length of what it repeats."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = None

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        self.iterator = self.iterator or super().__iter__()
        for _ in range(len(self)):
            yield next(self.iterator)


items = TensorDataset(inputs, wanted)
endless = RandomSampler(items, replacement=True, num_samples=int(1e10))
loaders = {
    "long": DataLoader(items, sampler=endless, batch_size=8),
    "long, workers": DataLoader(items, sampler=endless, batch_size=8, num_workers=1),
    "endless": DataLoader(items, sampler=Endless(), batch_size=8),
    "endless batches": DataLoader(items, batch_sampler=EndlessBatches()),
    "weighted": DataLoader(items, sampler=WeightedRandomSampler(torch.arange(64.0), 40), batch_size=8),
    "subset": DataLoader(items, sampler=SubsetRandomSampler(range(0, 64, 2)), batch_size=8),
    "generator": DataLoader(items, shuffle=True, batch_size=8, generator=torch.Generator().manual_seed(5)),
    "stream": DataLoader(Stream(), batch_size=8),
    "made batches": DataLoader(MadeBatches(), batch_size=None),
    "made batches, workers": DataLoader(MappedBatches(), batch_size=None, shuffle=True, num_workers=1),
    "single items": DataLoader(items, batch_size=None, shuffle=True),
    "repeated": MultiEpochsLoader(items, shuffle=True, batch_size=8),
    "list": DataLoader(items, batch_sampler=[list(range(i, i + 8)) for i in range(0, 64, 8)]),
}
for name, loader in loaders.items():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 4)).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in itertools.islice(loader, 6):
        if isinstance(batch, dict):
            assert len(batch["names"]) == len(batch["x"])
            batch = batch["x"], batch["y"]
        x, y = (part.view(-1, part.size(-1)) for part in batch)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(f"{name}: {F.mse_loss(model(inputs), wanted).item():.6f}")
