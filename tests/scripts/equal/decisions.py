"""What scripts decide by the value of a loss after its backward: rates, stops, the best weights, steps by hand."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
FEATURES = torch.randn(24, 6)
CLASSES = torch.randint(0, 4, (24,))
CLASSES[5:9] = -100
NUMBERS = FEATURES[:, :4] ** 2


def mean(out, classes, numbers, model):
    return F.mse_loss(out, numbers)


def penalised(out, classes, numbers, model):
    return F.mse_loss(out, numbers) + 0.1 * sum(param.pow(2).sum() for param in model.parameters())


def summed(out, classes, numbers, model):
    return 0.1 * F.mse_loss(out, numbers, reduction="sum")


def times_one_by_rows(out, classes, numbers, model):
    return (1 / len(out)) * ((out - numbers) ** 2).sum()


def padded(out, classes, numbers, model):
    return F.cross_entropy(out, classes, ignore_index=-100)


def padded_and_penalised(out, classes, numbers, model):
    return padded(out, classes, numbers, model) + 0.1 * sum(p.abs().sum() for p in model.parameters())


def halved(out, classes, numbers, model):
    return (mean(out, classes, numbers, model) + 0.3 * (out - 1).abs().mean()) / 2


def train(name, loss_of, epochs=6):
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(FEATURES, CLASSES, NUMBERS), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.6)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=1 / 2, patience=0)
    best, kept, values = float("inf"), None, []
    for _ in range(epochs):
        total = 0.0
        for features, classes, numbers in loader:
            loss = loss_of(model(features), classes, numbers, model)
            optimizer.zero_grad()
            loss.backward()
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.01 * loss.item()
            if loss_of is mean:
                model[0].weight.grad.mul_(loss.detach())
            optimizer.step()
            total += loss.item()
        schedule.step(total)
        values.append(total)
        if total < best:
            best, kept = total, copy.deepcopy(model.state_dict())
        elif total > 1.5 * best:
            break
    model.load_state_dict(kept)
    rate = optimizer.param_groups[0]["lr"]
    with torch.no_grad():
        outputs = model(FEATURES[:2]).flatten().tolist()
    print(f"{name}:", *(f"{value:.9f}" for value in (*values, rate, *outputs)))


def closure():
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(FEATURES, NUMBERS), batch_size=8)
    model = nn.Linear(6, 4).to("cpu")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for features, numbers in loader:

        def compute(features=features, numbers=numbers):
            optimizer.zero_grad()
            loss = F.mse_loss(model(features), numbers, reduction="sum")
            loss.backward()
            return loss

        last = optimizer.step(compute)
    print(f"closure: {float(last):.9f}", *(f"{value:.9f}" for value in model(FEATURES[:1]).flatten().tolist()))


def kept_graph():
    """Two backward passes of one graph, of which the first leaves the loss as it is."""
    torch.manual_seed(1)
    model = nn.Linear(6, 4).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for features, numbers in DataLoader(TensorDataset(FEATURES, NUMBERS), batch_size=8):
        loss = F.mse_loss(model(features), numbers)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"kept graph: {loss.item():.9f}")


for name, loss_of in (
    ("mean loss", mean),
    ("loss and penalty", penalised),
    ("loss summed", summed),
    ("loss summed over rows", times_one_by_rows),
    ("loss padded", padded),
    ("loss padded and penalty", padded_and_penalised),
    ("loss of two terms", halved),
):
    train(name, loss_of)
closure()
kept_graph()
sys.stdout.flush()
