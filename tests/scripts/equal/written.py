"""Models whose forward writes into parameters: weights clamped or normed, an encoder that follows another one."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 10)


def clamp(weight):
    with torch.no_grad():
        weight.clamp_(-0.2, 0.2)


def norm(weight):
    weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.3)


def follow(mean, weight):
    mean.data.mul_(0.5).add_(weight.data, alpha=0.5)


WAYS = {
    "clamped": (clamp, None),
    "clamped data": (lambda weight: weight.data.clamp_(-0.2, 0.2), None),
    "normed": (norm, None),
    "followed": (None, lambda mean, weight: mean.mul_(0.5).add_(weight.mul(0.5))),
    "followed data": (None, follow),
    "followed anew": (None, lambda mean, weight: setattr(mean, "data", mean.data * 0.5 + weight.data * 0.5)),
}


class Linear(nn.Linear):
    change = None

    def forward(self, x):
        if self.change:
            type(self).change(self.weight)
        return super().forward(x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Linear(10, 8), Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Net(nn.Module):
    def __init__(self, follow):
        super().__init__()
        self.trained, self.follow = Encoder(), follow
        self.mean = copy.deepcopy(self.trained).requires_grad_(False)

    def forward(self, x):
        out = self.trained(x)
        with torch.no_grad():
            for mean, weight in zip(self.mean.parameters(), self.trained.parameters(), strict=True):
                if self.follow:
                    self.follow(mean, weight)
            return out, self.mean(x)


for name, (Linear.change, follow) in WAYS.items():
    torch.manual_seed(1)
    model = Net(follow)
    optimizer = torch.optim.SGD(model.trained.parameters(), lr=0.5)
    losses = []
    for (x,) in DataLoader(TensorDataset(inputs), batch_size=16):
        out, mean = model(x)
        loss = (out - mean - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(f"{loss.item():.6f}")
    sums = [f"{param.detach().double().sum().item():.5f}" for param in model.parameters()]
    print(f"{name}: {' '.join(losses + sums)}")

PARTS = {
    "part by unbind": lambda w: w.unbind()[1].detach().mul_(0.5),
    "part by torch.unbind": lambda w: torch.unbind(w, 1)[2].data.zero_(),
    "part by a row": lambda w: w[0].detach().mul_(0.5),
    "parts of a loop": lambda w: [row.data.div_(row.norm().item()) for row in w],
    "parts of a turned loop": lambda w: [row.detach().add_(0.1) for row in w.t()],
    "part of a turned row": lambda w: w.t()[0].detach().mul_(0.5),
    "part by select": lambda w: w.select(1, 2).data.add_(1),
}
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(inputs), batch_size=16):
    for name, write in PARTS.items():
        write(model[0].weight)  # parts that have gradients, written without
        loss = model(x).pow(2).mean() + 0.1 * sum(row.norm() for row in model[0].weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{name} {len(losses)}: {loss.item():.6f} {model[0].weight.detach().norm().item():.6f}")
    losses.append("")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(10, 10)

    def forward(self, x):
        return x + torch.relu(self.inner(x))


@torch.no_grad()
def clamp_all(module, *_):
    for param in module.parameters():
        param.clamp_(-0.1, 0.1)


@torch.no_grad()
def shrink_all(module, *_):
    for param in module.parameters():
        param.data.mul_(0.9)


def hooked(model, blocks, number):
    """Hooks of units, of the model and of its blocks, around their passes."""
    of = blocks if number % 2 else [model]
    for module in of:
        if number < 4:
            module.register_forward_pre_hook(clamp_all if number < 2 else shrink_all)
        else:
            module.register_forward_hook(lambda module, *_: None if module.training else shrink_all(module))


for late in (False, True):
    for number in range(6):
        torch.manual_seed(3)
        blocks = nn.ModuleList(Block() for _ in range(3))
        model = nn.Sequential(*blocks, nn.Linear(10, 2))
        if not late:
            hooked(model, blocks, number)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if late:
            hooked(model, blocks, number)
        losses = []
        for (x,) in DataLoader(TensorDataset(inputs), batch_size=16):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                checked = model.eval()(inputs[:4]).mean()
            model.train()
            losses.append(f"{loss.item():.6f} {checked.item():.6f}")
        sums = [f"{param.detach().double().sum().item():.5f}" for param in model.parameters()]
        print(f"hooks {number} {late}: {' '.join(losses + sums)}")

# As attributes of the model, after a pass with gradients that no backward has followed.
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4, 4)
for step in range(2):
    print(f"seen {step}: {model(x).sum().item():.6f}")
    with torch.no_grad():
        model[0].weight.mul_(0.5)
        model[1].bias.add_(1.0)
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
model(x)
model[0].weight.requires_grad_(False)
frozen = model[0].weight.sum().item()
model(x).pow(2).mean().backward()
optimizer.step()
print(f"frozen as an attribute: {model[0].weight.sum().item() - frozen:.6f} {model(x).sum().item():.6f}")
