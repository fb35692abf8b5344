"""Optimizers built before or after their model is sharded train its shards, with the state and groups they had."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdplaunch
from fsdplaunch.errors import ShardingError
from tests.distributed.pool import RankPool
from tests.distributed.tiny import adamw, build, plugin, train_alone, train_sharded

STEPS = 10
MAKERS: dict[str, Any] = {
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}


def largest_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def given_before(version: int, name: str) -> float:
    make = MAKERS[name]
    alone = train_alone(build(), STEPS, make=make)
    model = build()
    optimizer = make(model.parameters())
    optimizer, model = fsdplaunch.prepare(optimizer, model, plugin=plugin(fsdp_version=version))
    return largest_difference(alone, train_sharded(model, optimizer, STEPS))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("version", [1, 2])
def test_optimizer_built_before_prepare_trains_as_alone(two_ranks: RankPool, version: int, name: str) -> None:
    assert two_ranks.run(given_before, version, name)[0] < 1e-5


def given_after(version: int) -> float:
    alone = train_alone(build(), STEPS)
    model = fsdplaunch.prepare(build(), plugin=plugin(fsdp_version=version))
    optimizer = fsdplaunch.prepare(adamw(model.parameters()), plugin=plugin(fsdp_version=version))
    return largest_difference(alone, train_sharded(model, optimizer, STEPS))


@pytest.mark.parametrize("version", [1, 2])
def test_optimizer_built_after_prepare_trains_as_alone(two_ranks: RankPool, version: int) -> None:
    assert two_ranks.run(given_after, version)[0] < 1e-5


def given_later(version: int) -> float:
    alone = train_alone(build(), STEPS)
    model = build()
    optimizer = adamw(model.parameters())
    model = fsdplaunch.prepare(model, plugin=plugin(fsdp_version=version))
    optimizer = fsdplaunch.prepare(optimizer, plugin=plugin(fsdp_version=version))
    return largest_difference(alone, train_sharded(model, optimizer, STEPS))


@pytest.mark.parametrize("version", [1, 2])
def test_optimizer_built_before_and_prepared_later_trains_as_alone(two_ranks: RankPool, version: int) -> None:
    assert two_ranks.run(given_later, version)[0] < 1e-5


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    plain = [p for n, p in model.named_parameters() if "norm" in n]
    return torch.optim.AdamW([{"params": decayed, "lr": 1e-2}, {"params": plain, "lr": 5e-2, "weight_decay": 0.0}])


def groups_and_schedule() -> tuple[float, list[float]]:
    alone_model = build()
    optimizer = grouped(alone_model)
    alone = train_alone(alone_model, STEPS, make=lambda _: optimizer)
    model = build()
    optimizer = grouped(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scheduler, model, optimizer = fsdplaunch.prepare(scheduler, model, optimizer, plugin=plugin(fsdp_version=2))
    sharded = train_sharded(model, optimizer, STEPS)
    scheduler.step()
    return largest_difference(alone, sharded), [group["lr"] for group in optimizer.param_groups]


def test_parameter_groups_and_scheduler_stay_with_their_optimizer(two_ranks: RankPool) -> None:
    difference, rates = two_ranks.run(groups_and_schedule)[0]
    assert difference < 1e-5
    assert rates == [5e-3, 2.5e-2]


def eager_state() -> tuple[bool, bool]:
    model = build()
    optimizer = MAKERS["adagrad"](model.parameters())
    model, optimizer = fsdplaunch.prepare(model, optimizer, plugin=plugin(fsdp_version=2))
    params = list(model.parameters())
    states = [optimizer.state[param]["sum"] for param in params]
    return len(optimizer.state) == len(params), all(
        isinstance(state, DTensor) and state.placements == param.placements
        for state, param in zip(states, params, strict=True)
    )


def test_state_made_before_sharding_is_sharded_like_its_parameter(two_ranks: RankPool) -> None:
    assert two_ranks.run(eager_state)[0] == (True, True)


def flat(groups: int, name: str = "sgd") -> Any:
    model = build()
    params = list(model.parameters())
    make = MAKERS[name]
    optimizer = make(params if groups == 1 else [{"params": params[:2]}, {"params": params[2:]}])
    alone = train_alone(build(), STEPS, make=make)
    fields = {"fsdp_version": 1, "use_orig_params": False}
    try:
        model, optimizer = fsdplaunch.prepare(model, optimizer, plugin=plugin(**fields))
    except ShardingError as error:
        return str(error)
    return largest_difference(alone, train_sharded(model, optimizer, STEPS))


@pytest.mark.parametrize("name", MAKERS)
def test_flat_parameters_replace_the_one_group(two_ranks: RankPool, name: str) -> None:
    assert two_ranks.run(flat, 1, name)[0] < 1e-5


def test_flat_parameters_refuse_several_groups(two_ranks: RankPool) -> None:
    message = two_ranks.run(flat, 2)[0]
    assert "2 parameter groups" in message
    assert "fsdp_use_orig_params" in message


def stranger() -> str:
    model = build()
    optimizer = adamw([*model.parameters(), nn.Parameter(torch.ones(3, 4))])
    try:
        fsdplaunch.prepare(model, optimizer, plugin=plugin(fsdp_version=2))
    except ShardingError as error:
        return str(error)
    return "nothing was raised"


def test_parameter_of_no_prepared_model_is_named(two_ranks: RankPool) -> None:
    message = two_ranks.run(stranger)[0]
    count = len(list(build().parameters()))
    assert f"parameter {count} of group 0, of shape (3, 4)" in message
