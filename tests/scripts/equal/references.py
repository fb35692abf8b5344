"""What was taken from a model before it was sharded: a list of its parameters, and an optimizer that is not torch's."""

import copy
import io
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset


class Foreign:
    """Of the shape of fastai's optimizers: groups, and state by parameter, in tables of its own."""

    def __init__(self, params, lr=0.1):
        self.groups, self.state, self.lr = [list(params)], {}, lr

    def zero_grad(self):
        for p in self.groups[0]:
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()

    @torch.no_grad()
    def step(self):
        for p in self.groups[0]:
            if p.grad is not None:
                state = self.state.setdefault(p, {"average": torch.zeros_like(p.grad)})
                state["average"].mul_(0.9).add_(p.grad.data)
                p.data.add_(state["average"], alpha=-self.lr)


torch.manual_seed(0)
inputs, wanted = torch.randn(32, 5), torch.randn(32, 3)


def no_change(params, first):
    pass


def clipped(params, first):
    clip_grad_norm_(params, 0.1)


def clipped_values(params, first):
    clip_grad_value_(params, 0.01)


def scaled(params, first):
    total = sum(p.grad.norm() ** 2 for p in params).sqrt()
    for p in params:
        p.grad = p.grad / (total + 1)


def multiplied(params, first):
    for p in params:
        p.grad *= 0.5 if p.dim() > 1 and len(p) > 3 else 0.25


def decayed(params, first):
    with torch.no_grad():
        for p in params:
            p.mul_(0.9)
        first -= 0.1 * first.grad
        first[0] = 0.5


def written(params, first):
    vector_to_parameters(parameters_to_vector(params) * 0.9, params)


def averaged(params, first):
    with torch.no_grad():
        for p, average in zip(params, averages, strict=True):
            average.lerp_(p, 0.5)
            p.copy_(average)


def frozen(params, first):
    first.requires_grad_(False)


@torch.no_grad()
def foreach(params, first):
    torch._foreach_mul_([p.grad for p in params], 0.5)
    torch._foreach_mul_(params, 0.9)


@torch.no_grad()
def mixed(params, first):
    """An average of a model has buffers among its values."""
    for place in (0, 1):
        beside = [p.grad for p in params]
        beside.insert(place, torch.ones(3))
        others = [*params]
        others.insert(place, torch.zeros(3))
        torch._foreach_lerp_(beside, others, 0.5)
        torch._foreach_mul_(beside, [each * 0 + 0.5 for each in beside])
        first.mul_(4 * beside[place].mean())


def exchanged(params, first):
    """Weights that are kept, and put into their place: both are the same memory then."""
    kept = [p.data.clone() for p in params]
    for p, value in zip(params, kept, strict=True):
        p.data = value
    with torch.no_grad():
        params[-1].mul_(0.5)
    torch.save([params, kept], io.BytesIO())
    params[-1].data.add_(kept[-1])


CHANGES = [
    no_change,
    clipped,
    clipped_values,
    scaled,
    multiplied,
    decayed,
    written,
    averaged,
    frozen,
    foreach,
    mixed,
    exchanged,
]
for change in CHANGES:
    for build in (torch.optim.SGD, Foreign):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        params, first = [p for p in model.parameters() if p.requires_grad], model[0].weight
        averages = copy.deepcopy([p.detach() for p in params])
        optimizer = build(params, lr=0.1)
        model.to("cpu")
        for x, y in DataLoader(TensorDataset(inputs, wanted), batch_size=16):
            optimizer.zero_grad()
            penalty = 0.01 * sum(p.pow(2).sum() for p in params) + 0.01 * first.abs().sum()
            (F.mse_loss(model(x), y) + penalty).backward()
            change(params, first)
            optimizer.step()
        with torch.no_grad():
            found = (
                F.mse_loss(model(inputs), wanted).item(),
                first.norm().item(),
                sum(p.sum().item() for p in params),
            )
        print(f"{change.__name__} {build.__name__}: {' '.join(f'{value:.6f}' for value in found)}")
        name = f"{change.__name__}_{build.__name__}"
        torch.save({"model": model.state_dict(), "params": params, "first": first}, f"{name}.pt")
        saved = torch.load(f"{name}.pt")["params"]
        print(f"{name} file: {sum(p.sum().item() for p in saved):.6f}")

model = nn.Sequential(nn.Linear(5, 3))
weight = model[0].weight
known = {weight: "weight"}
model.to("cpu")
x = torch.randn(4, 5)
print(
    f"same: {float(known[weight] == 'weight')} {float(isinstance(weight, nn.Parameter))} {float(weight.is_leaf)}"
)
first, *_ = torch.autograd.grad(model(x).square().mean(), [weight])
print(f"gradient: {first.norm().item():.6f}")
print(
    f"copy: {copy.deepcopy(weight).norm().item():.6f} {float(weight.detach().numpy().sum()):.6f} {weight.detach().abs().max():.6f}"
)
print(f"row: {' '.join(f'{row.sum().item():.6f}' for row in weight)} {len(weight)}.0")
print(f"shape: {' '.join(f'{size}.0' for size in weight.shape)} {weight.numel()}.0 {weight.size(0)}.0")
w = model[0].weight
views = {
    "turned": w.t(),
    "row": w[0],
    "column": w[:, 2],
    "flat": w.view(-1),
    "other": w.reshape(5, 3),
    "same": w[None],
}
w.data.mul_(1.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model(x).square().mean().backward()
optimizer.step()
for kind, view in views.items():
    print(
        f"view {kind}: {view.detach().norm().item():.6f} {view.norm().item():.6f} {view.detach()[0].sum().item():.6f}"
    )
with torch._C.DisableTorchFunctionSubclass():
    held = torch.Tensor.numel(weight)  # of the reference itself
if "RANK" in os.environ:
    print(f"{held} elements held", file=sys.stderr)
