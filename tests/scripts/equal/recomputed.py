"""Checkpoints written by hand: a function of the script's own computes its block again in its backward."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs, wanted = torch.randn(64, 8), torch.randn(64, 4)


class Again(torch.autograd.Function):
    """Of the shape of guided-diffusion's: the inputs, then the parameters that get gradients."""

    @staticmethod
    def forward(ctx, compute, number, *args):
        ctx.compute, ctx.inputs, ctx.params = compute, list(args[:number]), list(args[number:])
        with torch.no_grad():
            return ctx.compute(*ctx.inputs)

    @staticmethod
    def backward(ctx, *grads):
        ctx.inputs = [value.detach().requires_grad_(True) for value in ctx.inputs]
        with torch.enable_grad():
            outputs = ctx.compute(*[value.view_as(value) for value in ctx.inputs])
        found = torch.autograd.grad(outputs, ctx.inputs + ctx.params, grads, allow_unused=True)
        return (None, None, *found)


class Block(nn.Module):
    """Returns what its function made: a view of it, of another view, or a tensor of its own."""

    def __init__(self, made):
        super().__init__()
        self.first, self.last, self.made = nn.Linear(8, 16), nn.Linear(16, 8), made

    def forward(self, x):
        return Again.apply(self.compute, 1, x, *self.parameters())

    def compute(self, x):
        made = x + self.last(self.first(x).relu())
        if self.made == "view":
            return made.reshape(len(x), 2, 4).reshape(len(x), 8)
        return made[:, :].view(-1, 8) if self.made == "view of a view" else made


for made in ("tensor", "view", "view of a view"):
    for blocks in (1, 3):
        torch.manual_seed(1)
        model = nn.Sequential(*(Block(made) for _ in range(blocks)), nn.Linear(8, 4)).to("cpu")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for x, y in DataLoader(TensorDataset(inputs, wanted), batch_size=16):
            loss = (model(x) - y).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        changed = " ".join(f"{value.detach().double().norm().item():.6f}" for value in model.parameters())
        print(f"{made} {blocks}: {loss.item():.6f} {changed}")


for reentrant in (False, True):  # the whole model's pass, dropout in it
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4)).to("cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in DataLoader(TensorDataset(inputs, wanted), batch_size=16):
        out = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        optimizer.zero_grad()
        (out - y).pow(2).mean().backward()
        optimizer.step()
    changed = " ".join(f"{value.detach().double().norm().item():.6f}" for value in model.parameters())
    print(f"whole, reentrant {reentrant}: {changed}")
