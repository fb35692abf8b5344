"""Gradient accumulation, a scheduler, and resuming from its own checkpoint: model, optimizer, scheduler, epoch."""

import os

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

CHECKPOINT = "checkpoint.pt"
ACCUMULATE = 2
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return x + self.ff(self.norm(x))


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 20)
        self.blocks = nn.Sequential(*[Block(20) for _ in range(3)])
        self.out = nn.Linear(20, 1)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x)))


def build():
    torch.manual_seed(11)
    model = Regressor().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, CosineAnnealingLR(optimizer, T_max=4)


def train(until):
    model, optimizer, scheduler = build()
    start = 0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start = state["epoch"] + 1
        print(f"resumed at epoch {start}")
    torch.manual_seed(100 + start)
    x = torch.linspace(-1, 1, 192).view(32, 6)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4, shuffle=True)
    for epoch in range(start, until):
        model.train()
        for i, (xb, yb) in enumerate(loader):
            loss = nn.functional.mse_loss(model(xb.to(device)), yb.to(device))
            (loss / ACCUMULATE).backward()
            if (i + 1) % ACCUMULATE == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            print(f"epoch {epoch} step {i} loss {loss.item():.6f}")
        scheduler.step()
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
            },
            CHECKPOINT,
        )


train(until=1)
train(until=2)
