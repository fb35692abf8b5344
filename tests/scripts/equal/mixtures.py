"""Parameters, gradients and what the rows give, computed with each other by the script outside of the model."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs, wanted = torch.randn(32, 5), torch.randn(32, 3)
LOSSES = {
    "times norm": lambda loss, w, b, x, y: loss * w.norm(),
    "times squares": lambda loss, w, b, x, y: loss * w.pow(2).sum(),
    "over norm": lambda loss, w, b, x, y: loss / w.norm(),
    "shard times loss": lambda loss, w, b, x, y: (w * loss).sum(),
    "loss times shard": lambda loss, w, b, x, y: (loss * w).sum(),
    "times product": lambda loss, w, b, x, y: loss * (w.flatten() @ w.flatten()),
    "times element": lambda loss, w, b, x, y: loss * b[0],
    "times row": lambda loss, w, b, x, y: loss * torch.dot(w[0], w[1]) + loss * F.cosine_similarity(w[0], w[1], 0),
    "uncertainty": lambda loss, w, b, x, y: (loss * torch.exp(-b) + b).sum(),
    "stacked": lambda loss, w, b, x, y: torch.stack([loss, w.norm()]).mean(),
    "joined": lambda loss, w, b, x, y: torch.cat([loss.reshape(1), w.pow(2).sum().reshape(1)]).sum(),
    "columns": lambda loss, w, b, x, y: loss + (w * torch.arange(5.0)).sum(),
    "rows by shard": lambda loss, w, b, x, y: loss + (x @ w.t()).pow(2).mean(),
    "sum by shard": lambda loss, w, b, x, y: loss + 0.01 * (x @ w.t()).pow(2).sum(),
    "by label": lambda loss, w, b, x, y: loss + ((w[(y[:, 0] > 0).long()] - x) ** 2).mean(),
    "by column": lambda loss, w, b, x, y: (((x @ w.t())[:, :3] - y).pow(2).mean(0) * b).sum(),
    "each row": lambda loss, w, b, x, y: (F.mse_loss(x[:, :3], y, reduction="none") * b.exp()).mean(),
    "by mm": lambda loss, w, b, x, y: loss + torch.mm(x**2, (w**2).sum(0).unsqueeze(1)).mean(),
    "by mv": lambda loss, w, b, x, y: loss + torch.mv(x**2, w.pow(2).sum(0)).mean(),
    "by functions": lambda loss, w, b, x, y: (
        loss + torch.mul(x**2, w.pow(2).sum(0)).mean() + torch.add(loss, b.norm())
    ),
    "by einsum": lambda loss, w, b, x, y: loss + torch.einsum("nf,kf->nk", x, w).pow(2).mean(),
    "full": lambda loss, w, b, x, y: loss * (getattr(w, "full_tensor", lambda: w)() ** 2).sum(),
    "over loss": lambda loss, w, b, x, y: w.norm() / loss,
    "of loss": lambda loss, w, b, x, y: (w + loss).pow(2).mean(),
}
if tuple(map(int, torch.__version__.split(".")[:2])) < (
    2,
    11,
):  # an error at the line: torch gives `weight.t()` a full gradient there
    for turned in ("rows by shard", "sum by shard", "by column"):
        del LOSSES[turned]
for name, loss_of in LOSSES.items():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in DataLoader(TensorDataset(inputs, wanted), batch_size=16):
        optimizer.zero_grad()
        loss_of(F.mse_loss(model(x), y), model[0].weight, model[2].bias, x, y).backward()
        optimizer.step()
    with torch.no_grad():
        found = F.mse_loss(model(inputs), wanted).item(), *(p.norm().item() for p in model.parameters())
    print(f"{name}: {' '.join(f'{value:.6f}' for value in found)}")
