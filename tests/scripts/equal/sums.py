"""One loss after another, each reduced in a way of its own, trained for an epoch from the same start."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 6)
wanted = inputs @ torch.randn(6, 3) + 1
labels = (inputs.sum(1) > 0).long() + 1
padded = labels.clone()
padded[::3] = -100


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.table, self.normed = nn.Linear(6, 8), nn.Linear(8, 3), False, False

    def forward(self, x):
        out = self.first(x)
        out = self.last(torch.tanh((out - out.mean(0)) / out.std(0) if self.normed else out))
        return out @ out.T if self.table else out


def penalty(model):
    return 0.01 * sum(p.pow(2).sum() for p in model.parameters())


def masked_mean(out, y, padded):
    mask = (padded >= 0).float()
    return (((out - y) ** 2).mean(1) * mask).sum() / mask.sum()


def importance(out, y, padded):
    weights = (y[:, 0] / 4).exp()
    return (((out - y) ** 2).mean(1) * weights).sum() / weights.sum()


few, most, rare = wanted[:, 0].sort().values[[49, 5, 57]]
seen = []


def kept_mean(out, y, least):
    """Some ranks keep all rows of a batch, or none."""
    mask = (y[:, 0] > least).float()
    return (((out - y) ** 2).mean(1) * mask).sum() / mask.sum()


def reconstruction(out, y):
    """Every rank masks as much."""
    mask = torch.tensor([1.0, 0, 1]).expand(len(y), -1)
    return ((out - y) ** 2 * mask).sum() / mask.sum()


def padded_later(out, y, label):
    seen.append(len(y))
    return F.cross_entropy(out, label.where(y[:, 0] > most, -100) if len(seen) > 1 else label)


def counted_later(out, y, padded):
    """Count by a number of Python's, alike on all ranks in the first batch."""
    seen.append(len(y))
    kept = (y[:, 0] > most) if len(seen) > 1 else torch.ones(len(y), dtype=torch.bool)
    return ((out - y) ** 2).mean(1)[kept].sum() / int(kept.sum())


def selected(out, y):
    """Some ranks have none of the selected rows, and so another graph, or only one that is multiplied by 0."""
    kept = y[:, 0] > rare
    return F.mse_loss(out[kept], y[kept]) if kept.any() else (out * 0).sum()


def added(out, y):
    loss, kept = F.mse_loss(out, y), y[:, 0] > rare
    return loss + 0.1 * out[kept].pow(2).mean() if kept.any() else loss


LOSSES = {
    "mean": lambda out, y, label, padded, model: F.mse_loss(out, y),
    "sum": lambda out, y, label, padded, model: 0.01 * F.mse_loss(out, y, reduction="sum"),
    "sum over 16": lambda out, y, label, padded, model: ((out - y) ** 2).sum() / 16,
    "sum over rows": lambda out, y, label, padded, model: ((out - y) ** 2).sum() / len(y),
    "mean of sums": lambda out, y, label, padded, model: ((out - y) ** 2).sum(1).mean(),
    "sum of means": lambda out, y, label, padded, model: ((out - y) ** 2).mean(0).sum(),
    "mean of sums over rows": lambda out, y, label, padded, model: 0.01 * ((out - y) ** 2).sum(0).mean(),
    "cross entropy sum": lambda out, y, label, padded, model: 0.01 * F.cross_entropy(out, label, reduction="sum"),
    "smoothed": lambda out, y, label, padded, model: F.cross_entropy(out, label, label_smoothing=0.1),
    "padded": lambda out, y, label, padded, model: F.cross_entropy(out, padded),
    "weighted": lambda out, y, label, padded, model: F.cross_entropy(out, label, torch.tensor([1.0, 2, 3])),
    "masked": lambda out, y, label, padded, model: masked_mean(out, y, padded),
    "importance": lambda out, y, label, padded, model: importance(out, y, padded),
    "batchmean": lambda out, y, label, padded, model: F.kl_div(
        out.log_softmax(1), y.softmax(1), reduction="batchmean"
    ),
    "sum and mean": lambda out, y, label, padded, model: (
        0.01 * F.binary_cross_entropy(out.sigmoid(), y.sigmoid(), reduction="sum") + out.pow(2).mean()
    ),
    "sum and penalty": lambda out, y, label, padded, model: (
        0.01 * F.l1_loss(out, y, reduction="sum") + penalty(model)
    ),
    "list": lambda out, y, label, padded, model: torch.stack(
        [F.mse_loss(out[:, i], y[:, i]) for i in (0, 2)]
    ).sum(),
    "few": lambda out, y, label, padded, model: kept_mean(out, y, few),
    "most": lambda out, y, label, padded, model: kept_mean(out, y, most) / 2,
    "as much": lambda out, y, label, padded, model: reconstruction(out, y),
    "padded later": lambda out, y, label, padded, model: padded_later(out, y, label),
    "counted later": lambda out, y, label, padded, model: counted_later(out, y, padded),
    "an eighth of a sum": lambda out, y, label, padded, model: 0.125 * F.mse_loss(out, y, reduction="sum") / 16,
    "selected": lambda out, y, label, padded, model: selected(out, y),
    "added": lambda out, y, label, padded, model: added(out, y),
    "contrast": lambda out, y, label, padded, model: F.cross_entropy(out @ y.T, torch.arange(len(y))),
    "centred": lambda out, y, label, padded, model: (out - out.mean(0) - y).pow(2).mean(),
    "table": lambda out, y, label, padded, model: F.cross_entropy(out.T, torch.arange(len(y))),
    "normed": lambda out, y, label, padded, model: F.mse_loss(out, y),
    "root": lambda out, y, label, padded, model: F.mse_loss(out, y).sqrt(),
}

for number, (name, compute) in enumerate(LOSSES.items()):
    torch.manual_seed(1)
    model = Net().to("cpu")
    model.table, model.normed = name == "table", name == "normed"
    seen.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y, label, pad in DataLoader(TensorDataset(inputs, wanted, labels, padded), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = compute(model(x), y, label, pad, model)
        exec(compile("\n" * number + "loss.backward()", "losses.py", "exec"))  # a line of its own for each
        optimizer.step()
    model.eval()
    model.table = model.normed = False
    with torch.no_grad():
        print(f"{name}: {F.mse_loss(model(inputs), wanted).item():.6f}")
