"""Models that need the whole batch or are called in other ways: BatchNorm, `forward`, methods that train."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs, wanted = torch.randn(32, 2, 4, 4), torch.randn(32, 3)


class Norm(nn.Module):
    """Normalise rows, on a path beside one without."""

    def __init__(self, norm):
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), norm

    def forward(self, x):
        return x + torch.relu(self.norm(self.inner(x)))


class Net(nn.Module):
    """Has a method that trains, and calls `forward` of modules itself."""

    def __init__(self, momentum=0.1, affine=True):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2, momentum=momentum, affine=affine))
        self.blocks = nn.ModuleList(Norm(nn.BatchNorm1d(8, momentum=momentum, affine=affine)) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x).flatten(1)
        for block in self.blocks:
            x = block.forward(x)
        return self.head(x)

    def fit(self, x, y, optimizer):
        optimizer.zero_grad()
        F.mse_loss(self.forward(x), y).backward()
        optimizer.step()

    def train(self, mode=True, y=None, optimizer=None):
        return super().train(mode) if optimizer is None else self.fit(mode, y, optimizer)

    def embed(self, x):
        return self.stem(x).flatten(1)


class Wide(Net):
    """Has most of its parameters in no repeated block, and returns a view."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 99)

    def forward(self, x):
        return (super().forward(x) + self.wide(self.embed(x)).view(-1, 3, 33).mean(2)).view(len(x), 3)


class Viewed(Norm):
    """Returns a view."""

    def forward(self, x):
        return super().forward(x).view(len(x), 8)


def of_views(net, x, y, optimizer):
    optimizer.zero_grad()
    found = net(x)
    found += 1
    found.mul_(0.5)
    F.mse_loss(found, y).backward()
    optimizer.step()


class ChangedViews(Net):
    """Changes what its blocks return."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Viewed(nn.BatchNorm1d(8)) for _ in range(2))

    def forward(self, x):
        x = self.stem(x).flatten(1)
        for block in self.blocks:
            x = block(x)
            x *= 0.5
        return self.head(x)


class Experts(nn.Module):
    """Gives each row to one of its experts: a rank's rows may leave some out."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(1).max(1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                found[rows] = weight[rows, None] * expert(x[rows])
        return x + found


class Mixture(Net):
    """Has experts in its blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))


def by_hand(net, x, y, optimizer):
    optimizer.zero_grad()
    F.mse_loss(net(x), y).backward()
    optimizer.step()


def of_noise(net, x, y, optimizer):
    optimizer.zero_grad()
    fake = net(torch.randn(len(x), 2, 4, 4))
    (F.mse_loss(net(x), y) + F.mse_loss(fake, y)).backward()
    optimizer.step()


def of_all_rows(net, _x, _y, optimizer):
    by_hand(net, inputs, wanted, optimizer)


def on_eval(net, x, y, optimizer):
    by_hand(net.eval(), x, y, optimizer)


def taught(net, x, y, optimizer):
    teacher = copy.deepcopy(net)
    with torch.no_grad():
        target = teacher(x)  # normalises as it trains
    optimizer.zero_grad()
    (F.mse_loss(net(x), y) + F.mse_loss(net(x), target + 1)).backward()
    optimizer.step()


WAYS = {
    "norm": (Net, by_hand),
    "average": (lambda: Net(momentum=None), by_hand),
    "plain": (lambda: Net(affine=False), by_hand),
    "refreshed": (Net, by_hand),
    "experts": (Mixture, by_hand),
    "noise": (Net, of_noise),
    "taught": (Net, taught),
    "all rows": (Net, of_all_rows),
    "evaluating": (Net, on_eval),
    "wide": (Wide, of_views),
    "views": (ChangedViews, of_views),
    "fit": (Net, Net.fit),
    "train": (Net, lambda net, x, y, optimizer: net.train(x, y, optimizer)),
}
for name, (build, step) in WAYS.items():
    torch.manual_seed(1)
    net = build().to("cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for x, y in DataLoader(TensorDataset(inputs, wanted), batch_size=8, shuffle=True):
        step(net, x, y, optimizer)
    if name == "refreshed":  # by complete batches, the last of which has as many rows as a rank's share
        update_bn(DataLoader(TensorDataset(inputs), batch_size=28), net)
    net.eval()
    with torch.no_grad():
        means, variances = (sum(b.sum() for n, b in net.named_buffers() if n.endswith(e)) for e in ("mean", "var"))
        out, inner = net.forward(inputs), net.embed(inputs)
        print(f"{name}: {F.mse_loss(out, wanted):.6f} {inner.norm():.5f} {means:.5f} {variances:.5f}")

torch.manual_seed(1)
nets = nn.ModuleDict(
    {"stem": nn.Linear(32, 8), "layers": nn.ModuleList(Norm(nn.BatchNorm1d(8)) for _ in range(3))}
)
nets["head"] = nn.Linear(8, 3)
nets.to("cpu")
optimizer = torch.optim.SGD([{"params": each.parameters()} for each in nets.values()], lr=0.05)
for x, y in DataLoader(TensorDataset(inputs, wanted), batch_size=8, shuffle=True):
    hidden = nets["stem"](x.flatten(1))
    for layer in nets["layers"]:
        hidden = layer(hidden)
    F.mse_loss(nets["head"](hidden), y).backward()
    norm = nn.utils.clip_grad_norm_(nets.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
torch.save(nets.state_dict(), "nets.pt")
values = torch.load("nets.pt", weights_only=True)
print(f"held: {norm:.6f} {' '.join(f'{value.double().norm():.5f}' for value in values.values())}")
