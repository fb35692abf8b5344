"""An averaged copy of the weights, made by deepcopy and updated by hand; evaluated and saved."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, dim)

    def forward(self, x):
        return x + torch.tanh(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 16)
        self.body = nn.Sequential(Residual(16), Residual(16))
        self.head = nn.Linear(16, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


class EMA:
    def __init__(self, model, decay=0.9):
        self.module = copy.deepcopy(model).eval()
        for p in self.module.parameters():
            p.requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema_p, p in zip(self.module.parameters(), model.parameters()):
            ema_p.mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)
        for ema_b, b in zip(self.module.buffers(), model.buffers()):
            ema_b.copy_(b)


torch.manual_seed(21)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Net().to(device)
ema = EMA(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x, y = torch.randn(48, 5), torch.randint(0, 3, (48,))
train_loader = DataLoader(TensorDataset(x[:32], y[:32]), batch_size=8, shuffle=True)
val_loader = DataLoader(TensorDataset(x[32:], y[32:]), batch_size=8)
for epoch in range(2):
    model.train()
    for xb, yb in train_loader:
        loss = nn.functional.cross_entropy(model(xb.to(device)), yb.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.seen += 1
        ema.update(model)
        print(f"loss {loss.item():.6f}")
    with torch.no_grad():
        val = sum(
            nn.functional.cross_entropy(ema.module(xb.to(device)), yb.to(device)).item() for xb, yb in val_loader
        )
    weight = sum(p.detach().norm() ** 2 for p in ema.module.parameters()) ** 0.5
    print(f"epoch {epoch} averaged loss {val / len(val_loader):.6f}, weight norm {weight:.4f}")
torch.save({"model": model.state_dict(), "ema": ema.module.state_dict()}, "ema.pt")
