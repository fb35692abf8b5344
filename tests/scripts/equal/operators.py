"""Operators that an optimizer or a penalty may be written with, many of them unknown to torch's DTensor."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def flat(value):
    """Return all numbers of nested lists, each times its place, so that none may be anywhere else."""
    values = value.tolist() if isinstance(value, torch.Tensor) else value
    if isinstance(values, list | tuple):
        return [number for each in values for number in flat(each)]
    return [float(values)]


eye, both, square = torch.eye(5), torch.linspace(-1, 1, 35).view(7, 5), torch.linspace(-1, 1, 49).view(7, 7)
index, five, seven = torch.tensor([4, 1]), torch.linspace(-1, 1, 5), torch.linspace(-1, 2, 7)
WRITES = {
    "hardtanh_": lambda w, b: F.hardtanh_(w, -0.2, 0.2),
    "hardswish_": lambda w, b: F.hardswish(w, inplace=True),
    "elu_": lambda w, b: F.elu_(w),
    "leaky_relu_": lambda w, b: F.leaky_relu_(w),
    "threshold_": lambda w, b: F.threshold_(w, 0.1, 0.3),
    "clamp_min_": lambda w, b: w.clamp_min_(w.roll(1, 1)),
    "heaviside_": lambda w, b: w.heaviside_(w.flip(1)),
    "hypot_": lambda w, b: w.hypot_(w[:, :1].clone()),  # torch gives no order to a write into what it reads
    "floor_divide_": lambda w, b: w.floor_divide_(0.1),
    "cumsum_": lambda w, b: w.cumsum_(0),
    "put_": lambda w, b: w.put_(index, torch.tensor([0.5, 0.7])),
    "index_copy_": lambda w, b: w.index_copy_(0, index, torch.ones(2, 5)),
    "scatter_reduce_": lambda w, b: b.scatter_reduce_(0, index, torch.ones(2), "sum"),
    "renorm_": lambda w, b: w.renorm_(2, 0, 0.5),
    "addr_": lambda w, b: w.addr_(seven, five),
    "tril_": lambda w, b: w.tril_(),
    "masked_scatter_": lambda w, b: w.masked_scatter_(w > 0, torch.linspace(0, 1, 35)),
    "random_": lambda w, b: w.random_(0, 9),
    "bernoulli_": lambda w, b: w.bernoulli_(w.abs().clamp_max(1)),
    "foreach maximum": lambda w, b: torch._foreach_maximum_([w, b], [0.1, 0.2]),
    "foreach pow": lambda w, b: torch._foreach_pow_([w, b], 2.0),
    "foreach tanh": lambda w, b: torch._foreach_tanh_([w, b]),
    "renorm out": lambda w, b: torch.renorm(w.clone(), 2, 0, 0.5, out=w),
    "part": lambda w, b: F.hardtanh_(w[2:4], -0.1, 0.1),
    "part by place": lambda w, b: w[1:6].put_(index, torch.tensor([0.5, 0.7])),
}
READS = {
    "renorm": lambda w, b: w.renorm(2, 0, 0.5),
    "trace": lambda w, b: w.trace(),
    "isin": lambda w, b: torch.isin(b, b[2:3]),
    "count": lambda w, b: torch.count_nonzero(w > 0, dim=0),
    "sort": lambda w, b: w.sort(0),
    "topk": lambda w, b: w.topk(3, 0),
    "median": lambda w, b: w.median(),
    "kthvalue": lambda w, b: w.kthvalue(2, 0),
    "cummax": lambda w, b: w.cummax(0),
    "logcumsumexp": lambda w, b: w.logcumsumexp(0),
    "roll": lambda w, b: w.roll(2, 0),
    "flip": lambda w, b: w.flip(0),
    "dist": lambda w, b: torch.dist(b, b.flip(0)),
    "close": lambda w, b: torch.allclose(w, w.clone()),
    "masked": lambda w, b: w.masked_select(w > 0),
    "histc": lambda w, b: w.histc(4, -1, 1),
    "bucketize": lambda w, b: torch.bucketize(w, b.sort().values),
    "svd": lambda w, b: torch.linalg.svdvals(w),
    "inverse": lambda w, b: torch.linalg.inv(w[:5] + 3 * torch.eye(5)),
    "cross": lambda w, b: torch.linalg.cross(w[:, :3], w[:, 1:4]),
    "mv": lambda w, b: w.mv(w[0]),
    "addmv": lambda w, b: torch.addmv(b, w, w[0]),
    "poisson": lambda w, b: torch.poisson(w.abs()),
    "conj": lambda w, b: w.conj_physical(),
    "unfold": lambda w, b: w.unfold(0, 2, 1),
}
PENALTIES = {
    "one_view": lambda w, b: torch.norm(torch.cat([p.view(-1) for p in (w, b)]), 1),
    "one_function": lambda w, b: (
        torch.cat([torch.flatten(w), torch.ravel(b), torch.reshape(w, (-1,))]).abs().sum()
    ),
    "one_flatten": lambda w, b: torch.cat([w.flatten(), b.ravel(), w.reshape(-1)]).pow(2).sum(),
    "one_vector": lambda w, b: nn.utils.parameters_to_vector([w, b]).abs().max(),
    "hardshrink": lambda w, b: F.hardshrink(w, 0.1).pow(2).sum(),
    "logsigmoid": lambda w, b: F.logsigmoid(w).mean(),
    "renormed": lambda w, b: w.renorm(2, 0, 0.5).square().sum(),
    "differences": lambda w, b: w.diff(dim=0).abs().mean(),
    "cumulated": lambda w, b: w.cumsum(0).pow(2).mean(),
    "glu": lambda w, b: F.glu(w[:6], 0).pow(2).sum(),
    "one_chunk": lambda w, b: w.chunk(3)[1].pow(2).sum() + torch.chunk(w, dim=1, chunks=2)[1].abs().mean(),
    "one_of_split": lambda w, b: torch.split(w, [2, 5])[1].abs().mean() + b.split(3, dim=0)[2].square().sum(),
    "one_row": lambda w, b: w.unbind()[-1].pow(2).sum() + torch.unbind(w, dim=1)[2].abs().sum(),
    "products": lambda w, b: (w.t() @ w - eye).square().sum() + torch.mm(w.t(), w).sub(eye).norm(),
    "turned": lambda w, b: (eye - w.t() @ w).square().sum() + torch.einsum("ij,ik->jk", w, w).add(eye).norm(),
    "products_in_place": lambda w, b: (w.t() @ w).sub_(eye).mul_(1 - eye).square().sum(),
    "chosen": lambda w, b: torch.where(eye > 0, eye, w.t() @ w).sum() + torch.maximum(w, 0.1 * both).sum(),
    "distance": lambda w, b: torch.dist(w.t() @ w, eye) + (w.sum(0) - five).square().sum(),
    "traces": lambda w, b: torch.trace(w.t() @ w) + (w @ w.T @ w @ w.T).trace() + torch.logdet(w.t() @ w + eye),
    "square": lambda w, b: ((w @ w.t()) @ square).square().mean(),
}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(16, 5), torch.randn(16, 1)), batch_size=8)
weight, bias = model[0].weight, model[0].bias
begin = {name: value.clone() for name, value in model.state_dict().items()}


def tell(kind, name, values):
    print(f"{kind} {name.replace('_', '')}: {sum(number * (1 + i % 11) for i, number in enumerate(values)):.6f}")


for x, y in loader:
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
for name, write in WRITES.items():
    model.load_state_dict(begin)
    torch.manual_seed(1)
    with torch.no_grad():
        write(weight, bias)
        tell("write", name, flat(weight) + flat(bias))
        write(weight.data, bias.data)
    tell("again", name, flat(weight) + flat(bias))
model.load_state_dict(begin)
for name, read in READS.items():
    torch.manual_seed(1)
    with torch.no_grad():
        tell("read", name, flat(read(weight, bias)))
for name, penalty in PENALTIES.items():
    model.load_state_dict(begin)
    for x, y in loader:
        (F.mse_loss(model(x), y) + 0.1 * penalty(weight, bias)).backward()
        optimizer.step()
        optimizer.zero_grad()
    tell("penalty", name, flat(weight))
