"""A batch of as many rows as there are ranks: one row on each; and ranks that count nothing of theirs."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RANKS = int(sys.argv[1])
torch.manual_seed(0)
X, Y = torch.randn(8 * RANKS, 6), torch.randint(0, 3, (8 * RANKS,))


def each(out, y):
    return F.cross_entropy(out, y, reduction="none")


losses = {
    "divergence": lambda out, x, y: F.kl_div(out.log_softmax(1), x[:, :3].softmax(1), reduction="batchmean"),
    "over rows": lambda out, x, y: out.pow(2).sum() / len(x),
    "of one row each": lambda out, x, y: (out[:, 0].squeeze() - x[:, 0].squeeze()).pow(2).sum() / len(x),
    "squeezed": lambda out, x, y: F.mse_loss(out[:, 0].squeeze(), x[:, 0].squeeze()),
    "summed": lambda out, x, y: 0.01 * out.pow(2).sum(),
    "masked number": lambda out, x, y: (each(out, y) * (y > 0).float()).sum() / max(int((y > 0).sum()), 1),
    "selected": lambda out, x, y: each(out, y)[y > 0].sum() / max(int((y > 0).sum()), 1),
    "ignored": lambda out, x, y: F.cross_entropy(out, y, reduction="sum", ignore_index=0) / (y > 0).sum().clamp(1),
}
for number, (name, loss_of) in enumerate(losses.items(), 1):
    torch.manual_seed(1)
    model = nn.Linear(6, 3).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=RANKS):
        loss = loss_of(model(x), x, y)
        optimizer.zero_grad()
        exec(compile("\n" * number + "loss.backward()", "losses.py", "exec"))
        optimizer.step()
    print(f"{name}: {loss.item():.6f} {model(X).detach().square().sum().item():.6f}")
