"""A training script that does, or does not, compute the same over workers; its arguments say which."""

import os
import secrets
import sys

import numpy as np
import torch
from torch import nn

modes = sys.argv[1:]
torch.manual_seed(0)
if "initial-weights" in modes:
    torch.manual_seed(int(os.environ.get("WORLD_SIZE", "1")))


class Block(nn.Module):
    """A residual block, with what the modes put in it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16) if "batch-norm" in modes else nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))


first = nn.Linear(8, 16)
if "padding" in modes:  # with a weight that is not in order in memory
    first = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 16, 2), nn.Flatten())
    first = first.to(memory_format=torch.channels_last)
model = nn.Sequential(first, *[Block() for _ in range(3)], nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizers = [optimizer]
if "optimizer-each" in modes:  # in the order of a set
    optimizers = [torch.optim.SGD([param], lr=1e-3) for param in model.parameters()]
    secrets.SystemRandom().shuffle(optimizers)
rows = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
if "batch-norm" in modes:  # by a generator that is given no seed
    rows = torch.utils.data.TensorDataset(
        *torch.tensor(np.random.default_rng().normal(size=(64, 9))).float().split([8, 1], 1)
    )
order = torch.Generator().manual_seed(1)
if "other-data" in modes:
    order.manual_seed(int(os.environ.get("WORLD_SIZE", "1")))
loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, generator=order)
compare = nn.MSELoss()
torch.jit.trace(model.eval(), rows[:2][0])  # shapes are tensors meanwhile
model.train()
if "never" in modes:
    sys.exit()
for x, y in loader:
    found = model(x)
    if "randomness" in modes:  # one process draws less before
        torch.rand(int(os.environ.get("WORLD_SIZE", "1")))
        found = found + torch.rand(())
    if "rounding" in modes:
        found = torch.sin(1e5 * found)  # what is added up in another order goes elsewhere at the next step
    loss = compare(found, y)
    if "padding" in modes:
        labels = (y[:, 0] > 0).long().masked_fill(x[:, 0] > 0, -100)
        loss = nn.functional.cross_entropy(torch.cat([found, -found], 1), labels)
    optimizer.zero_grad()
    loss.backward()
    if "full-gradients" in modes:  # as gradients of several tasks are projected on each other
        whole = torch.cat([param.grad.reshape(-1) for param in model.parameters()])
        sizes = [param.numel() for param in model.parameters()]
        for param, part in zip(model.parameters(), whole.split(sizes), strict=True):
            param.grad = part.view_as(param).clone()
    for each in optimizers:
        each.step()
