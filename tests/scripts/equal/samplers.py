"""Samplers that are long, endless, weighted or the script's own, streams, and what is left unseeded."""

import itertools
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

unseeded = [random.random(), np.random.rand(), np.random.default_rng().random(), torch.seed()]
unseeded += [random.Random().random(), torch.Generator().initial_seed()]
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
    "list": DataLoader(items, batch_sampler=[list(range(i, i + 8)) for i in range(0, 64, 8)]),
}
for name, loader in loaders.items():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 4)).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in itertools.islice(loader, 6):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(f"{name}: {F.mse_loss(model(inputs), wanted).item():.6f}")
