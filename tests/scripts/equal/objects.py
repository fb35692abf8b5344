"""Tensors that blocks are given and return in objects of the script's own, which torch's trees know nothing of."""

from collections import UserDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Plain:
    def __init__(self, x):
        self.x = x


class Store:
    def __init__(self, x):
        self.mapping = {"x": x}


class Nested:  # as torch_geometric's batches
    def __init__(self, x):
        self.store = Store(x)

    @property
    def x(self):
        return self.store.mapping["x"]


class Slots:
    __slots__ = ("rows", "x")

    def __init__(self, x):
        self.x = x


@dataclass
class Data:
    x: torch.Tensor


class Named(UserDict):
    def __init__(self, x):
        super().__init__(x=x)

    @property
    def x(self):
        return self["x"]


class Rows:
    def __init__(self, x):
        self.parts = [Plain(x)]

    @property
    def x(self):
        return self.parts[0].x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, given):
        return type(given)(given.x + self.second(F.dropout(torch.relu(self.first(given.x)), 0.2, self.training)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(5, 3)

    def forward(self, given):
        for block in self.blocks:
            given = block(given)
        return type(given)(self.head(given.x))


torch.manual_seed(0)
inputs, wanted = torch.randn(32, 5), torch.randn(32, 3)
for kind in (Plain, Nested, Slots, Data, Named, Rows):
    torch.manual_seed(1)
    model = Net().to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in DataLoader(TensorDataset(inputs, wanted), batch_size=8):
        optimizer.zero_grad()
        F.mse_loss(model(kind(x)).x, y).backward()
        optimizer.step()
    found = F.mse_loss(model.eval()(kind(inputs)).x, wanted).item(), *(p.norm().item() for p in model.parameters())
    print(f"{kind.__name__}: {' '.join(f'{value:.6f}' for value in found)}")
