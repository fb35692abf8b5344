"""Optimizers that look at whole tensors, with a closure or without, through a checkpoint of theirs."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Adafactor

torch.manual_seed(0)
inputs, wanted = torch.randn(32, 4), torch.randn(32, 3)
OPTIMIZERS = {
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=5),
    "line search": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=5, line_search_fn="strong_wolfe"),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "transformers": lambda params: Adafactor(params, lr=1e-2, relative_step=False),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2),
}
for name, build in OPTIMIZERS.items():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).to("cpu")
    optimizer = build(model.parameters())

    def step():
        if name == "transformers":  # computes closures without gradients
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)

    for x, y in DataLoader(TensorDataset(inputs, wanted), batch_size=16):

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        step()
    torch.save(optimizer.state_dict(), f"{name.replace(' ', '_')}.pt")
    optimizer.load_state_dict(torch.load(f"{name.replace(' ', '_')}.pt"))
    step()
    with torch.no_grad():
        print(f"{name}: {F.mse_loss(model(inputs), wanted).item():.6f}")

for moved in (True, False):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    if moved:
        model.to("cpu")
    first = {id(param) for param in model.parameters() if param.dim() > 1}
    optimizers = [torch.optim.SGD([param for param in model.parameters() if param.dim() > 1], lr=0.1)]
    optimizers.append(torch.optim.Adam([param for param in model.parameters() if id(param) not in first]))
    for optimizer in optimizers:
        optimizer.zero_grad()
    F.mse_loss(model(inputs), wanted).backward()
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        print(f"{'two' if moved else 'mistaken'}: {F.mse_loss(model(inputs), wanted).item():.6f}")
