"""Gradients that are differentiated again, WGAN-GP and R1, and gradients by parameters."""

import torch
import torch.nn.functional as F
from torch import autograd, nn
from torch.func import jvp
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
points = torch.randn(32, 2) * 0.5 + 1


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        inner = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.main = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.1), inner, nn.Tanh())
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.main(x)).squeeze(1)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(4, 16), nn.ReLU(True), nn.Linear(16, 2))

    def forward(self, z):
        return self.main(z)


def penalty(critic, real, fake):
    alpha = torch.rand(real.size(0), 1)
    between = autograd.Variable(alpha * real + (1 - alpha) * fake, requires_grad=True)
    out = critic(between)
    (gradient,) = autograd.grad(
        outputs=out,
        inputs=between,
        grad_outputs=torch.ones(out.size()),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )
    return 0.5 * ((gradient.norm(2, dim=1) - 1) ** 2).mean()


critic, generator = Critic().to("cpu"), Generator().to("cpu")
critic_step = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
generator_step = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
for epoch in range(3):
    for (real,) in DataLoader(TensorDataset(points), batch_size=8, shuffle=True):
        critic_step.zero_grad()
        fake = generator(torch.randn(real.size(0), 4)).detach()
        if epoch == 0:
            (critic(fake).mean() - critic(real).mean() + penalty(critic, real, fake)).backward()
        elif epoch == 1:
            (-critic(real).mean()).backward()
            critic(fake).mean().backward()
            penalty(critic, real, fake).backward()
        else:
            real.requires_grad_()
            out = critic(real)
            (gradient,) = autograd.grad(out.sum(), real, create_graph=True)
            (0.1 * gradient.pow(2).sum(1).mean() + F.softplus(-out).mean()).backward()
        critic_step.step()
        generator_step.zero_grad()
        (-critic(generator(torch.randn(real.size(0), 4))).mean()).backward()
        generator_step.step()
    for name, model in (("critic", critic), ("generator", generator)):
        print(f"{name} {epoch}: {sum(p.abs().sum().item() for p in model.parameters()):.6f}")

model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(points), batch_size=8):
    gradients = torch.autograd.grad(F.mse_loss(model(x), x.flip(1)), dict(model.named_parameters()).values())
    with torch.no_grad():
        for p, gradient in zip(model.parameters(), gradients):
            p -= 0.1 * gradient
with torch.no_grad():
    print(f"by hand: {F.mse_loss(model(points), points.flip(1)).item():.6f}")
    print(f"no gradients: {sum(p.grad is not None for p in model.parameters()):.1f}")


def pushed(model, x):
    out, tangent = jvp(model, (x,), (torch.randn_like(x),))
    return tangent.square().mean() + out.square().mean()


def regularised(model, x):
    scores = model(x.requires_grad_())
    (gradient,) = autograd.grad(scores.sum(), x, create_graph=True)
    return 0.5 * gradient.square().sum(1).mean() * 16 + 0 * scores[0, 0]  # so that all parameters have gradients


FORWARD_MODE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # an error of torch's own before
for term in (pushed, regularised) if FORWARD_MODE else (regularised,):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).to("cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for (x,) in DataLoader(TensorDataset(points), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        (F.mse_loss(model(x), x.flip(1)) + 0.1 * term(model, x)).backward()
        optimizer.step()
    with torch.no_grad():
        print(f"{term.__name__}: {F.mse_loss(model(points), points.flip(1)).item():.6f}")
