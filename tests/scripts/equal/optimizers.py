"""Optimizers that look at whole tensors, with a closure or without, through a checkpoint of theirs."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Adafactor


class Stacked(torch.optim.Optimizer):
    """Of the shape of nanochat's Muon: parameters in one stack, state that is made as plain tensors."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [param for param in group["params"] if param.dim() > 1]
            gradients, stack = torch.stack([param.grad for param in params]), torch.stack(params)
            state = self.state[params[0]]
            if not state:
                state["momentum"], state["rows"] = torch.zeros(stack.shape), torch.zeros(*stack.shape[:-1], 1)
            state["momentum"].lerp_(gradients, 0.5)
            update = gradients.lerp(state["momentum"], 0.5)
            update = update / (update.norm(dim=(-2, -1), keepdim=True) + 1e-6)
            update = 1.5 * update - 0.5 * update @ update.mT @ update
            mean = update.square().mean(dim=-1, keepdim=True)
            state["rows"].lerp_(mean, 0.5)
            size = state["rows"].clamp_min(1e-10).rsqrt()
            update = update * (size * (mean * size.square()).sum(dim=(-2, -1), keepdim=True).sqrt() * 0.1)
            stack.sub_(group["lr"] * update + 0.01 * stack * (update * stack >= 0))
            torch._foreach_copy_(params, list(stack.unbind(0)))


class Rolled(torch.optim.Optimizer):
    """Its step calls what torch does not know of shards, the first time in the run."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(group["lr"] * param.grad.roll(1, 0).renorm(2, 0, 1.0))


torch.manual_seed(0)
inputs, wanted = torch.randn(32, 4), torch.randn(32, 3)
OPTIMIZERS = {
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=5),
    "line search": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=5, line_search_fn="strong_wolfe"),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "transformers": lambda params: Adafactor(params, lr=1e-2, relative_step=False),
    "stacked": lambda params: Stacked([param for param in params if param.shape == (7, 7)]),
    "rolled": lambda params: Rolled([param for param in params if param.dim() > 1]),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2),
}
if hasattr(torch.optim, "Muon"):  # from 2.9 on
    OPTIMIZERS["muon"] = lambda params: torch.optim.Muon([param for param in params if param.dim() > 1], lr=0.1)
for name, build in OPTIMIZERS.items():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 7), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)).to("cpu")
    optimizer = build(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step():
        if name in ("transformers", "stacked", "rolled"):  # computes closures without gradients, has none
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
        scheduler.step()
    torch.save(optimizer.state_dict(), f"{name.replace(' ', '_')}.pt")
    optimizer.load_state_dict(torch.load(f"{name.replace(' ', '_')}.pt"))
    step()
    with torch.no_grad():
        print(f"{name}: {F.mse_loss(model(inputs), wanted).item():.6f}")

for moved in (True, False):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    if moved:
        model.to("cpu")
    first = {id(param) for param in model.parameters() if param.dim() > 1}
    optimizers = [torch.optim.SGD([param for param in model.parameters() if param.dim() > 1], lr=0.1)]
    optimizers.append(torch.optim.Adam([param for param in model.parameters() if id(param) not in first]))
    for optimizer in optimizers:
        optimizer.zero_grad()
    F.mse_loss(model(inputs), wanted[:, :1]).backward()
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        print(f"{'two' if moved else 'mistaken'}: {F.mse_loss(model(inputs), wanted[:, :1]).item():.6f}")


def backward(x, y, *, between=lambda: None):
    loss = F.mse_loss(model(x), y)
    between()
    loss.backward()


def clear():
    for number, p in enumerate(model.parameters()):
        if number == 0:
            del p.grad
        elif number % 2 and p.grad is not None:
            p.grad.detach_()
            p.grad.zero_()
        else:
            p.grad = None


def look(x, y):
    optimizer.zero_grad()
    backward(x, y)
    F.mse_loss(model(x), y)  # with gradients, and no backward follows
    optimizer.step()
    model(x)
    for p in model.parameters():
        p.data.clamp_(-0.4, 0.4)


def accumulate(x, y):
    if next(turns) % 2:
        optimizer.zero_grad()
    backward(x, y)
    optimizer.step()


def give(x, y):
    gradients = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
    fast = {name: p - 0.5 * g for (name, p), g in zip(model.named_parameters(), gradients)}
    optimizer.zero_grad()
    F.mse_loss(torch.func.functional_call(model, fast, (x,)), y).backward()
    optimizer.step()


def write(x, y):
    optimizer.zero_grad()
    backward(x, y)
    model[2].weight.grad[1:] = 0
    optimizer.step()
    model[0].bias.data[2:5].fill_(0.1)
    model[0].weight.data[model[0].weight.data.abs() < 0.1] = 0
    for row in model[0].weight.data:
        row.div_(1 + row.norm())
    model[2].weight.data.unbind()[2].mul_(0.5)
    model[2].weight.data.diagonal().clip_(-0.2, 0.2)
    model[0].weight.data.index_fill_(0, torch.tensor([1, 4]), 0.1)
    model[0].weight.data.masked_fill_(torch.eye(6, 4).bool(), 0.2)
    torch.relu_(torch.chunk(model[2].weight.data, 2)[1].t())
    first, second = torch.split(model[0].bias.data, [2, 4])
    nn.init.ones_(first)
    torch.mul(second, 0.5, out=second)
    model[2].weight[1:3].detach().view(-1)[::2].mul_(0.5)
    torch._foreach_mul_([torch.narrow(model[0].weight.data, 0, 1, 3), model[2].bias.data], 0.9)
    F.hardtanh(torch.select(optimizer.param_groups[0]["params"][0].grad, 0, 1), -0.1, 0.1, inplace=True)
    model[0].weight.data[model[0].weight.data > 0.3] *= 0.5
    kept, *_ = model[2].weight.data
    kept.mul_(0.9)
    model(x)
    with torch.no_grad():
        model[2].weight.mul_(0.9)
    model[2].bias.requires_grad = False


def clamp(gradient):
    return gradient.clamp(-0.05, 0.05)


turns = itertools.count()
STEPS = {"cleared between": lambda x, y: (backward(x, y, between=clear), optimizer.step()), "looked at": look}
for name, step in (STEPS | {"hooked": accumulate, "given": give, "written": write}).items():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    if name == "hooked":
        model[0].weight.register_hook(clamp)
    model.to("cpu")
    print(f"tried {name}: {model(inputs).sum().item():.6f}")
    model.apply(lambda part: isinstance(part, nn.Linear) and nn.init.eye_(part.weight))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if name == "hooked":
        model[2].weight.register_hook(clamp)
    for x, y in DataLoader(TensorDataset(inputs, wanted), batch_size=8):
        step(x, y)
    scripted = torch.jit.script(model)
    with torch.no_grad():
        print(f"{name}: {F.mse_loss(model(inputs), wanted).item():.6f} {scripted(inputs).sum().item():.6f}")
