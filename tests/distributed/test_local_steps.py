"""Torch's optimizers compute with local shards what they compute with DTensors, to the last bit."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdplaunch.runtime.sharding.optimizers import stepping_with_local_shards
from tests.distributed.pool import RankPool

STEPS = 4
SHAPES = ((4, 3), (5,), (1, 6), (3, 2, 2))
"""Over two ranks: even, uneven, and none of it on one of them."""
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Adagrad": [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}, {"fused": True}, {"lr": torch.tensor(0.01)}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}, {"fused": True, "amsgrad": True}],
    "Adamax": [{}, {"weight_decay": 0.1}],
    "ASGD": [{}, {"t0": 2}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}, {"weight_decay": 0.1}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "SGD": [
        {"lr": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
}
CASES = [
    (name, {**options, **({"foreach": True} if foreach else {})})
    for name, several in OPTIONS.items()
    for options in several
    for foreach in (False, True)
    if not (foreach and ("fused" in options or isinstance(options.get("lr"), torch.Tensor)))
]


def shards() -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in full]


def train(params: list[Any], name: str, options: dict[str, Any], *, local: bool) -> Any:
    """Step with gradients of which one is missing at first; return the parameters, and their optimizer."""
    generator = torch.Generator().manual_seed(1)
    optimizer = getattr(torch.optim, name)(params, **options)
    with stepping_with_local_shards() if local else nullcontext():
        for step in range(STEPS):
            for place, param in enumerate(params):
                gradient = torch.randn(param.shape, generator=generator)
                if isinstance(param, DTensor):
                    gradient = distribute_tensor(gradient, param.device_mesh, [Shard(0)])
                if step or place:
                    param.grad = gradient
            optimizer.step()
    return params, optimizer


def differing(name: str, options: dict[str, Any]) -> list[str]:
    """Return what differs between both ways: parameters, state, or how often torch says they were changed."""
    (plain, of_plain), (params, optimizer) = (
        train(shards(), name, options, local=local) for local in (False, True)
    )
    found = [
        f"parameter {place}"
        for place, (one, other) in enumerate(zip(plain, params, strict=True))
        if not torch.equal(one.to_local(), other.to_local()) or one.placements != other.placements
    ]
    if any(each._version == 0 for each in [*params, *sharded_state(optimizer, params)]):  # what autograd goes by
        found.append("changes")
    for place, (one, other) in enumerate(zip(plain, params, strict=True)):
        state, expected = optimizer.state[other], of_plain.state[one]
        if state.keys() != expected.keys():
            found.append(f"keys of {place}")
        for key, value in expected.items():
            if type(value) is not type(state[key]) or not same(value, state[key]):
                found.append(f"{key} of {place}: {value}, {state[key]}")
    return found


def sharded_state(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Any]:
    """Return the state that is divided as its parameters are."""
    return [value for param in params for value in optimizer.state[param].values() if isinstance(value, DTensor)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, DTensor):
        return one.placements == other.placements and torch.equal(one.to_local(), other.to_local())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def all_differing() -> dict[str, list[str]]:
    return {f"{name} {options}": found for name, options in CASES if (found := differing(name, options))}


def test_each_of_torchs_optimizers_computes_the_same(two_ranks: RankPool) -> None:
    assert two_ranks.run(all_differing) == [{}, {}]


def full_apart(name: str, options: dict[str, Any]) -> float:
    """Return how far shards are from what plain tensors become."""
    params, _ = train(shards(), name, options, local=True)
    full = [nn.Parameter(param.full_tensor().detach()) for param in shards()]
    plain, _ = train(full, name, options, local=False)
    ends = [(one.detach(), other.full_tensor().detach()) for one, other in zip(plain, params, strict=True)]
    return max(float((one - other).abs().max()) for one, other in ends)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Rprop", {"etas": (0.4, 1.3)}),
        ("Rprop", {"foreach": True}),
        ("Adagrad", {"fused": True}),
        ("SGD", {"lr": 0.1, "fused": True}),
    ],
)
def test_what_torch_refuses_with_shards_computes_as_one_process(
    two_ranks: RankPool, name: str, options: dict[str, Any]
) -> None:
    assert max(two_ranks.run(full_apart, name, options)) < 1e-6


def operators_seen(lr: float) -> int:
    """Return how many operators on shards a second step runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += DTensor in types
            return func(*args, **(kwargs or {}))

    params = shards()
    optimizer = torch.optim.SGD(params, lr=lr, momentum=0.9)
    with stepping_with_local_shards(), Count() as count:
        for _ in range(2):
            count.seen = 0
            for param in params:
                param.grad = torch.ones_like(param)
            before = count.seen
            optimizer.step()
    return count.seen - before


def test_no_operator_of_a_step_is_run_on_dtensors(two_ranks: RankPool) -> None:
    assert two_ranks.run(operators_seen, 0.1) == [0, 0]
