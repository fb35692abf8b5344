"""A variational autoencoder whose encode and decode are called by themselves, with Lion written out in the script."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset


class Lion(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                update = state["exp_avg"] * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(20, 16)
        self.mu = nn.Linear(16, 4)
        self.logvar = nn.Linear(16, 4)
        self.fc3 = nn.Linear(4, 16)
        self.fc4 = nn.Linear(16, 20)

    def encode(self, x):
        h = F.relu(self.fc1(x))
        return self.mu(h), self.logvar(h)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(mu), mu, logvar


torch.manual_seed(4)
device = "cuda" if torch.cuda.is_available() else "cpu"
data = torch.rand(32, 20)
loader = DataLoader(TensorDataset(data), batch_size=8, shuffle=True)
model = VAE().to(device)
optimizer = Lion(model.parameters(), lr=3e-3, weight_decay=0.01)
for epoch in range(2):
    model.train()
    for (x,) in loader:
        x = x.to(device)
        recon, mu, logvar = model(x)
        kld = -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())
        loss = F.binary_cross_entropy(recon, x) + 0.1 * kld
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.6f}")
    model.eval()
    with torch.no_grad():
        sample = model.decode(torch.ones(2, 4, device=device))
        mean, _ = model.encode(data[:2].to(device))
    print(f"epoch {epoch}: sample {sample.mean():.4f}, latent {mean.abs().max().item():.4f}")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sample": sample.cpu()}, "vae.pt")
