"""What a script takes of a sharded model under `torch.inference_mode()`, between steps of training."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 5)


def step():
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def halved(w):
    for row in w:
        row.mul_(0.5)
    return w


step()
READS = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data.detach(),
    "transposed": lambda w: w.t() @ w,
    "view": lambda w: w.view(-1),
    "row": lambda w: w[0],
    "slice": lambda w: w[1:3],
    "chunk": lambda w: w.chunk(2)[0],
    "narrow": lambda w: w.narrow(0, 1, 2),
    "split": lambda w: w.tensor_split(3)[1],
    "moved": lambda w: w.movedim(0, 1).mT,
    "rows": lambda w: list(w)[3],
    "clone": lambda w: w.data.clone().mul_(2),
    "written": lambda w: w[2].mul_(3.0),
    "cleared": lambda w: w.data[3:5].zero_(),
    "halved": halved,
    "joined": lambda w: torch.cat([p.detach().reshape(-1) for p in model.parameters()]),
    "pass": lambda w: model(x),
}
for name, read in READS.items():
    with torch.inference_mode():
        print(f"{name}: {read(model[0].weight).sum().item():.6f} {model[0].weight.norm().item():.6f}")
print(f"trained: {step().item():.6f} {step().item():.6f}")
