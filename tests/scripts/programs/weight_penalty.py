"""A penalty on the weights added to the loss by hand, and norms of gradients and weights in the log."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(32, 6)
loader = DataLoader(TensorDataset(x, x[:, :2] * x[:, 2:3]), batch_size=8, shuffle=True)
for epoch in range(2):
    for xb, yb in loader:
        loss = nn.functional.mse_loss(model(xb.to(device)), yb.to(device))
        loss = loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.stack([p.grad.detach().norm() for p in model.parameters()]).norm().item()
        optimizer.step()
        weight_norm = sum(p.detach().pow(2).sum().item() for p in model.parameters()) ** 0.5
        print(f"loss {loss.item():.6f} grad loss {grad_norm:.6f} weight loss {weight_norm:.6f}")
torch.save(model.state_dict(), "model.pt")
