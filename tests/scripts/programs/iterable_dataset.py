"""A stream of records without a length, shuffled in a buffer."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, count, buffer=16):
        self.count = count
        self.buffer = buffer

    def records(self):
        for i in range(self.count):
            x = torch.tensor([i % 7, i % 5, i % 3, 1.0])
            yield x, (x.sum() > 6).float()

    def __iter__(self):
        held = []
        for record in self.records():
            held.append(record)
            if len(held) == self.buffer:
                random.shuffle(held)
                yield from held
                held = []
        yield from held


random.seed(5)
torch.manual_seed(5)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
loader = DataLoader(Stream(64), batch_size=8)
step = 0
for epoch in range(2):
    for x, y in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(x.to(device)).squeeze(-1), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        print(f"step {step} loss {loss.item():.6f}")
print(f"{step} steps")
torch.save(model.state_dict(), "model.pt")
