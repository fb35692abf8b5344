"""Tensors that blocks are given and return in objects of the script's own, which torch's trees know nothing of."""

from collections import OrderedDict, UserDict
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


class Graph:
    """Rows of several nodes each, as many as it happens, with the row that each is of."""

    def __init__(self, rows):
        self.x = torch.cat(
            [inputs[row].repeat(1 + row % 3, 1) * torch.arange(1, 2 + row % 3)[:, None] for row in rows]
        )
        self.row = torch.cat([torch.full((1 + row % 3,), number) for number, row in enumerate(rows)])
        self.wanted = wanted[rows]


class Nodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x, row):
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.zeros(int(row.max()) + 1, 8).index_add(0, row, x))


def trained(model, rows, pass_of):
    torch.manual_seed(1)
    model = model.to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for graph in DataLoader(rows, batch_size=8, collate_fn=Graph):
        optimizer.zero_grad()
        F.mse_loss(pass_of(model, graph), graph.wanted).backward()
        optimizer.step()
    numbers = *(p.norm().item() for p in model.parameters()), *(b.double().norm().item() for b in model.buffers())
    return " ".join(f"{value:.6f}" for value in numbers)


print("nodes:", trained(Nodes(), list(range(32)), lambda model, graph: model(graph.x, graph.row)))
x, row = Graph(list(range(32))).x, Graph(list(range(32))).row  # which all ranks have
both = trained(Nodes(), list(range(32)), lambda model, graph: model(graph.x, graph.row) + model(x, row).mean())
print("of all:", both)


@dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor
    logits: torch.Tensor


class Mapped(OrderedDict):
    def __init__(self, loss, logits):
        super().__init__(loss=loss, logits=logits)

    def __getattr__(self, name):
        return self[name]


class Slotted:
    __slots__ = ("loss", "logits")

    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


class Pair:
    def __init__(self, loss, logits):
        self.pair = loss, logits

    loss, logits = property(lambda self: self.pair[0]), property(lambda self: self.pair[1])


class Counting:
    def __init__(self, loss, logits):
        self.loss, self.logits, self.rows = loss, logits, len(logits)


class OwnLoss(nn.Module):
    """Returns its own loss, a mean over labels that are not the same number in each half of a batch."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(5, 8), nn.Linear(8, 3), kind

    def forward(self, x, labels):
        logits = self.last(torch.tanh(self.first(x)))
        return self.kind(F.cross_entropy(logits, labels, ignore_index=-100), logits)


labels = torch.randint(3, (32,)).masked_fill(torch.arange(32) % 8 > 4, -100)
for kind in (Frozen, Mapped, Slotted, Pair, Counting):
    torch.manual_seed(1)
    model = OwnLoss(kind).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for x, y in DataLoader(TensorDataset(inputs, labels), batch_size=8):
        optimizer.zero_grad()
        out = model(x, y)
        out.loss.backward()
        optimizer.step()
        seen += [out.loss.item(), out.logits.sum().item()]
    found = *seen, *(p.norm().item() for p in model.parameters())
    print(f"{kind.__name__} with its loss: {' '.join(f'{value:.6f}' for value in found)}")


class Words(nn.Module):
    """Returns a mean over the labels that are not `left_out`, of many: nearly as many in each half of a batch."""

    def __init__(self, left_out):
        super().__init__()
        self.table, self.last, self.left_out = nn.Embedding(9, 8), nn.Linear(8, 9), left_out

    def forward(self, words, following):
        logits = self.last(torch.tanh(self.table(words)))
        return logits, F.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=self.left_out)


words, following = torch.randint(9, (16, 300)), torch.randint(9, (16, 300))
for left_out in (-1, 3):
    torch.manual_seed(1)
    model, seen = Words(left_out).to("cpu"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    given = following.masked_fill(torch.rand(16, 300) < 0.02, left_out)
    for x, y in DataLoader(TensorDataset(words, given), batch_size=4):
        optimizer.zero_grad()
        loss = model(x, y)[1]
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    print(f"without labels of {left_out}: {' '.join(f'{value:.6f}' for value in seen)}")
