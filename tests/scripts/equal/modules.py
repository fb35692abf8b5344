"""Exact types after the model has moved, copies, pickles, and tensors made from parameters."""

import copy
import io
import pickle
from abc import ABC
from typing import Generic, TypeVar

import torch
from torch import nn

torch.manual_seed(0)


Rows = TypeVar("Rows")


class Block(Generic[Rows], nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 4)

    def forward(self, x):
        weight = next(self.parameters())
        return x + self.rnn(x, weight.new_zeros(1, x.size(1), 4))[0]


class Net(ABC, nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x, hidden):
        return self.head(self.blocks(x) + hidden)

    def init_hidden(self, rows):
        weight = next(self.parameters())
        return weight.new_zeros(3, rows, 4) + weight.new_full((1,), 0.5) + weight.new_tensor([0.1])


def init(module):
    if type(module) == nn.Linear:  # noqa: E721
        nn.init.constant_(module.bias, 0.25)
    if module.__class__.__name__ == "Block":
        nn.init.normal_(module.rnn.bias_hh_l0)


model = Net().to("cpu")
model.apply(init)
print(type(model) is Net, type(model.blocks[0]) is Block, model.__class__.__name__, str(model).split("(")[0])
x, hidden = torch.randn(3, 5, 4), model.init_hidden(5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(x, hidden).pow(2).mean().backward()
optimizer.step()
with torch.no_grad():
    print(f"{model(x, hidden).sum().item():.5f}")

weight = model.head.weight
made = [weight.new_zeros(2, 3), weight.new_ones((2,)), weight.new_empty(1), weight.new(2, 2).zero_(), hidden]
print([type(each) is torch.Tensor for each in made], weight.dtype, weight.device, weight.shape, weight.numel())
torch.manual_seed(3)
print(
    f"{torch.randn_like(weight).sum():.5f} {torch.rand_like(weight).sum():.5f} {sum(r.sum() for r in weight):.5f}"
)
state = torch.zeros_like(model.head.bias) + 0.5
print(
    f"{model(x[..., :4], torch.zeros_like(weight)[0]).sum():.4f} {model(x, hidden * 0 + state.mean()).sum():.4f}"
)
moments = weight.new_zeros(weight.shape)
moments.add_(weight.grad)
print(f"{moments.norm().item():.5f}")

twin, block = copy.deepcopy(model), copy.deepcopy(model.blocks[0])
loaded = pickle.loads(pickle.dumps(model))
print(
    type(twin) is Net, type(block) is Block, type(loaded) is Net, type(next(loaded.parameters())) is nn.Parameter
)
held = pickle.loads(pickle.dumps({"model": model.state_dict(), "weight": model.head.weight}))
print([type(value) is torch.Tensor for value in held["model"].values()], type(held["weight"]) is nn.Parameter)
print([(name, tuple(value.shape), f"{value.sum():.4f}") for name, value in held["model"].items()])
for each in (twin, loaded):
    print(f"{each(x, hidden).sum().item():.5f}")
print(f"{block(x).sum().item():.5f}")

shallow, same_block = copy.copy(model), copy.copy(model.blocks[0])
with torch.no_grad():
    model.blocks[0].get_parameter(next(iter(model.blocks[0].state_dict()))).mul_(1.5)
    print(f"{shallow(x, hidden).sum() - model(x, hidden).sum():.3f} {same_block(x).sum().item():.4f}")
print(type(shallow) is Net, next(shallow.parameters()) is next(model.parameters()), len(shallow.state_dict()))

torch.save(model, "model.pt")
torch.save({"model": model, "step": 3}, "with_step.pt")
torch.save(model.blocks[1], "block.pt")
with open("handle.pt", "wb") as handle:
    torch.save(model, handle)
buffer = io.BytesIO()
torch.save(model, buffer)
print(f"{torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)(x, hidden).sum().item():.5f}")
with open("failed.pt", "wb") as handle:
    handle.write(b"before")
    try:
        torch.save({"model": model, "no": lambda: None}, handle)
    except Exception as error:
        print(type(error).__name__)
model.to("cpu")
print(f"{model(x, hidden).sum().item():.3f}")
