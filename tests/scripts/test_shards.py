"""What scripts do with shards outside of passes, by losses of each rank, on numbers of ranks that do not fit."""

from pathlib import Path

import pytest

from tests.scripts.conftest import PROGRAMS, Forks, Run, lines

OWN_ROWS = """
import os, sys, torch
from torch import nn
ranks = int(sys.argv[1])
torch.manual_seed(0)
inputs = torch.randn(ranks, 4, 5)
own = [int(os.environ["RANK"])] if "RANK" in os.environ else range(ranks)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to("cpu")
weight, bias = model[0].weight, model[0].bias
before = weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
LOSSES = {
    "norm": lambda loss, x: loss * weight.norm() + loss * bias.sum(),
    "element": lambda loss, x: loss * weight[0, 2] + weight[3].square().sum(),
    "rows": lambda loss, x: loss + (x @ weight.t()).square().mean(),
    "apart": lambda loss, x: loss + (weight - before).pow(2).sum() + bias.abs().mean(),
    "least": lambda loss, x: loss * weight.min() + bias.max(),
    "order": lambda loss, x: loss * torch.linalg.svdvals(weight)[0] + weight.sort(0).values[2].sum(),
    "each": lambda loss, x: loss + sum(row.norm() for row in weight),
}
for name, loss_of in LOSSES.items():
    for _ in range(2):
        optimizer.zero_grad()
        for rank in own:
            (loss_of(model(inputs[rank]).square().mean(), inputs[rank]) / len(own)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        weight.data[3:6].clamp_(-0.3, 0.3)
        weight.data.chunk(4)[1].mul_(0.9)
    print(f"{name}: {weight.norm().item():.6f} {bias.norm().item():.6f} {weight.t()[1].sum().item():.6f}")
"""


def test_gradients_of_shards_outside_of_passes_are_the_mean_of_all_ranks(forks: Forks, tmp_path: Path) -> None:
    plain = forks.run(OWN_ROWS, tmp_path / "plain", "3")
    many = forks.passes(OWN_ROWS, tmp_path / "many", "3", ranks=3)
    expected = lines(plain.out[0])
    assert len(expected) == 7
    for out in many.out:
        found = lines(out)
        for name, numbers in expected.items():
            assert found[name] == pytest.approx(numbers, abs=1e-5), name


FUNCTIONAL = """
import torch
model = torch.nn.Linear(4, 1).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
halved = {name: value * 0.5 for name, value in model.named_parameters()}
print(torch.func.functional_call(model, halved, (torch.ones(2, 4),)).dtype)
"""


def test_a_functional_call_computes_in_the_dtype_of_mixed_precision(forks: Forks, tmp_path: Path) -> None:
    assert (
        forks.passes(FUNCTIONAL, tmp_path / "run", ranks=2, mixed_precision="bf16").out == ["torch.bfloat16\n"] * 2
    )


TRANSFORMED = """
import torch
from torch import nn
from torch.func import functional_call, jacrev, vjp, vmap
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, params = torch.ones(4, 2), dict(model.named_parameters())
model(x).mean().backward()
{line}
"""
TRANSFORM = "train.py:9: a transform of torch.func computes Sequential, which is sharded"
CHANGED = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4)).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weight = model[0].weight
{line}
"""
IN_PLACE = "a leaf Variable that requires grad is being used in an in-place operation"
REFUSED = {
    "vmap(jacrev(model))(x)": TRANSFORM,
    "vjp(model, x)[1](torch.ones(4, 2))": TRANSFORM,
    "vmap(jacrev(lambda row: functional_call(model, params, (row,))))(x)": TRANSFORM,
    "weight[0] = 1.0": f"train.py:6: {IN_PLACE}",
    "weight.mul_(2)": IN_PLACE,
    "weight.data = torch.ones(2, 2)": "train.py:6: .data of a sharded parameter of shape (4, 4) is given (2, 2)",
    "weight.data.storage()": "train.py:6: storage(): no memory holds all of a sharded tensor",
    "model[0].register_parameter('other', weight)": "train.py:6: other of Sequential appeared after the model",
    "weight.detach().numpy()[0] = 1": "assignment destination is read-only",
}


@pytest.fixture(scope="module")
def refused(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    texts = {
        line: (TRANSFORMED if error is TRANSFORM else CHANGED).format(line=line) for line, error in REFUSED.items()
    }
    return forks.beside(tmp_path_factory.mktemp("refused"), texts)


@pytest.mark.parametrize("line", REFUSED)
def test_what_shards_cannot_have_is_an_error_at_its_line(refused: dict[str, Run], line: str) -> None:
    for err in refused[line].err:
        assert REFUSED[line] in err
        assert ("--num-processes 1 --shard off" in err) == (REFUSED[line] is TRANSFORM)


def test_an_evaluation_after_training_with_parameters_kept_gathered(forks: Forks, tmp_path: Path) -> None:
    keys = {"fsdp_config__fsdp_reshard_after_forward": False}
    done = forks.passes(PROGRAMS / "nano_gpt.py", tmp_path / "run", ranks=2, **keys)
    assert "step 3: val loss" in done.out[0]


COUNTED = """
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
class Gathers(TorchDispatchMode):
    count = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Gathers.count += "all_gather" in str(func)
        return func(*args, **(kwargs or {}))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
params = list(model.parameters())
(1e3 * model(torch.ones(4, 5)).square().mean()).backward()
average = [param.detach().clone() for param in params]
with Gathers():
    print(f"norm: {float(nn.utils.clip_grad_norm_(params, 1.0)):.3f}")
    torch._foreach_lerp_(average, [param.detach() for param in params], 0.1)
    nn.utils.clip_grad_value_(params, 0.01)
    torch._foreach_add_(average, [param.grad for param in params], alpha=-0.1)
print(f"gathers: {Gathers.count}")
print(f"after: {params[0].grad.norm().item():.6f} {average[2].norm().item():.6f}")
"""


def test_what_goes_by_element_over_lists_gathers_nothing(forks: Forks, tmp_path: Path) -> None:
    plain = forks.run(COUNTED, tmp_path / "plain")
    many = forks.passes(COUNTED, tmp_path / "many", ranks=2)
    for out in many.out:
        assert lines(out) == {name: pytest.approx(found, rel=1e-4) for name, found in lines(plain.out[0]).items()}


BY_ELEMENT = """
import torch
from torch import nn
from torch.nn import functional
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weight, bias = model[0].weight.data, model[0].bias.data  # 7 rows
row = weight[6]
total = torch.zeros_like(weight)
torch.add(input=weight, other=weight, out=total)
print("out", total.sum().item())
weight.mul_(2)
print("seen", row.sum().item())
functional.relu_(input=total)
total.lerp_(weight, 0.25)
print("relu", total.sum().item(), (total > 0.1).sum().item(), torch.where(total > 0.1, total, weight).sum().item())
mantissa, exponent = torch.frexp(weight)
print("frexp", mantissa.sum().item(), exponent.sum().item(), exponent.dtype)
params = [param.detach() for param in model.parameters()]
scaled = torch._foreach_mul(params, 3.0)
torch._foreach_addcmul_(params, scaled, params, 0.5)
print("lists", *(each.sum().item() for each in (*params, *scaled)))
weight.copy_(torch.arange(35.0).view(7, 5))
print("copied", row.tolist(), weight.double().dtype, weight.float() is weight)
print("columns", torch.add(weight, bias[:, None]).sum().item())
last = model[2].weight.data  # one row
last.clamp_(max=0.05).neg_()
print("row", last.abs().sum().item(), nn.Parameter(last).detach().sign().sum().item())
"""


def test_what_goes_by_element_is_that_of_one_process_where_rows_do_not_divide(
    forks: Forks, tmp_path: Path
) -> None:
    plain = forks.run(BY_ELEMENT, tmp_path / "plain")
    for out in forks.passes(BY_ELEMENT, tmp_path / "many", ranks=3).out:
        for one, other in zip(plain.out[0].split(), out.split(), strict=True):
            assert one == other or float(one) == pytest.approx(float(other), rel=1e-5)
