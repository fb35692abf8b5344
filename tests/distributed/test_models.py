"""Models with something special about them, sharded and trained as if they were whole."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fsdplaunch
from fsdplaunch.runtime.inspection.parameters import clean_name
from tests.distributed.pool import RankPool
from tests.distributed.tiny import (
    VOCAB,
    Block,
    Norm,
    TinyLM,
    adamw,
    batch,
    build,
    loss_of,
    mean_over_ranks,
    my_part,
    plugin,
    train_alone,
    train_sharded,
)

STEPS = 10


def largest_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def whole(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


# Tied weights


def tied(fields: dict[str, Any]) -> tuple[float, bool]:
    alone = train_alone(build(tied=True), STEPS)
    model = build(tied=True)
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    sharded = train_sharded(model, optimizer, STEPS)
    if fields["fsdp_version"] == 1:
        names = [name for name, _ in model.named_parameters()]
        return largest_difference(alone, sharded), sum("embed" in n or "head" in n for n in names) == 1
    return largest_difference(alone, sharded), model.embed.weight is model.head.weight


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("wrap", [{}, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 500}])
def test_tied_weights_stay_one_parameter(two_ranks: RankPool, version: int, wrap: dict[str, Any]) -> None:
    difference, one = two_ranks.run(tied, {"fsdp_version": version, **wrap})[0]
    assert difference < 1e-5
    assert one


# Activation checkpointing


def checkpointed(fields: dict[str, Any]) -> tuple[float, int, list[str]]:
    alone = train_alone(build(), STEPS)
    calls: list[int] = []
    model = build()
    model.layers[0].attention.register_forward_pre_hook(lambda *_: calls.append(1))
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    sharded = train_sharded(model, optimizer, STEPS)
    return (
        largest_difference(alone, sharded),
        len(calls),
        sorted(clean_name(n) for n, _ in model.named_parameters()),
    )


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("wrap", ["TRANSFORMER_BASED_WRAP", "NO_WRAP"])
def test_activation_checkpointing_computes_blocks_twice(two_ranks: RankPool, version: int, wrap: str) -> None:
    fields = {"fsdp_version": version, "activation_checkpointing": True, "auto_wrap_policy": wrap}
    difference, calls, names = two_ranks.run(checkpointed, fields)[0]
    assert difference < 1e-5
    assert calls == 2 * STEPS
    assert names == sorted(name for name, _ in build().named_parameters())


# Frozen parameters


def frozen(version: int) -> tuple[float, float]:
    def freeze(model: TinyLM) -> TinyLM:
        model.embed.weight.requires_grad_(False)
        model.layers[1].attention.qkv.weight.requires_grad_(False)
        return model

    alone = train_alone(freeze(build()), STEPS)
    model = freeze(build())
    before = model.embed.weight.detach().clone()
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(fsdp_version=version))
    sharded = train_sharded(model, optimizer, STEPS)
    if version == 1:
        return largest_difference(alone, sharded), 0.0
    return largest_difference(alone, sharded), (whole(model.embed.weight) - before).abs().max().item()


@pytest.mark.parametrize("version", [1, 2])
def test_frozen_parameters_do_not_move(two_ranks: RankPool, version: int) -> None:
    difference, moved = two_ranks.run(frozen, version)[0]
    assert difference < 1e-5
    assert moved == 0.0


# Ignored modules


def ignored(version: int, pattern: str) -> tuple[float, list[str], float]:
    alone = train_alone(build(), STEPS)
    model = build(seed=dist.get_rank() and 5)
    fields = {"fsdp_version": version, "ignored_modules": pattern}
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    sharded = train_sharded(model, optimizer, STEPS)
    plain = [clean_name(n) for n, p in model.named_parameters() if tuple(p.shape) == (2 * 16, 16)]
    weight = {clean_name(n): p for n, p in model.named_parameters()}["layers.0.feed_forward.up.weight"]
    copies = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, weight.detach())
    return largest_difference(alone, sharded), plain, (copies[0] - copies[1]).abs().max().item()


@pytest.mark.parametrize("version", [1, 2])
def test_ignored_modules_stay_unsharded_and_equal_on_all_ranks(two_ranks: RankPool, version: int) -> None:
    difference, plain, drift = two_ranks.run(ignored, version, r"layers\.0\.feed_forward")[0]
    assert "layers.0.feed_forward.up.weight" in plain
    assert difference < 1e-5
    assert drift == 0.0


# Several models, one optimizer


class Pair(nn.Module):
    def __init__(self, first: TinyLM, second: TinyLM) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.first(ids) + self.second(ids)


def two_models(version: int) -> tuple[list[float], list[float]]:
    alone = train_alone(Pair(build(0), build(1, layers=2)), STEPS, clip=1e9)
    first, second = build(0), build(1, layers=2)
    optimizer = adamw([*first.parameters(), *second.parameters()])
    first, optimizer, second = fsdplaunch.prepare(first, optimizer, second, plugin=plugin(fsdp_version=version))
    losses = []
    for step in range(STEPS):
        ids = my_part(batch(step))
        logits = first(ids[:, :-1]) + second(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return alone, losses


@pytest.mark.parametrize("version", [1, 2])
def test_two_models_in_any_order_train_with_one_optimizer(two_ranks: RankPool, version: int) -> None:
    alone, sharded = two_ranks.run(two_models, version)[0]
    assert largest_difference(alone, sharded) < 1e-5


def without_optimizer() -> float:
    model = fsdplaunch.prepare(build(), plugin=plugin(fsdp_version=2))
    with torch.no_grad():
        return (model(batch(0)) - build()(batch(0))).abs().max().item()


def test_model_alone_is_returned_alone_and_computes_the_same(two_ranks: RankPool) -> None:
    assert two_ranks.run(without_optimizer)[0] < 1e-6


# Ranks that start different


def different_seeds(version: int) -> float:
    alone = train_alone(build(0), STEPS)
    model = build(seed=dist.get_rank())
    model.scale.fill_(1.0 + dist.get_rank())
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(fsdp_version=version))
    return largest_difference(alone, train_sharded(model, optimizer, STEPS))


@pytest.mark.parametrize("version", [1, 2])
def test_models_of_different_seeds_start_as_rank_0s(two_ranks: RankPool, version: int) -> None:
    assert two_ranks.run(different_seeds, version)[0] < 1e-5


def weights_on_rank_0_only(version: int, empty: str, options: dict[str, Any]) -> float:
    alone = train_alone(build(**options), STEPS)
    if dist.get_rank() == 0:
        model = build(**options)
    elif empty == "meta":
        with torch.device("meta"):
            model = build(**options)
    else:
        model = build(**options).to_empty(device="cpu")
    optimizer = adamw(model.parameters())
    fields = {"fsdp_version": version, "cpu_ram_efficient_loading": True}
    model, optimizer = fsdplaunch.prepare(model, optimizer, plugin=plugin(**fields))
    return largest_difference(alone, train_sharded(model, optimizer, STEPS))


@pytest.mark.parametrize("options", [{}, {"tied": True}])
@pytest.mark.parametrize("empty", ["meta", "garbage"])
@pytest.mark.parametrize("version", [1, 2])
def test_weights_on_rank_0_only_reach_all_ranks(
    two_ranks: RankPool, version: int, empty: str, options: dict[str, Any]
) -> None:
    assert two_ranks.run(weights_on_rank_0_only, version, empty, options)[0] < 1e-5


class Resettable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def no_weights_anywhere(version: int) -> tuple[bool, float]:
    with torch.device("meta"):
        model = Resettable()
    model = fsdplaunch.prepare(model, plugin=plugin(fsdp_version=version))
    out = model(torch.ones(2, 8))
    total = out.detach().clone()
    dist.broadcast(total, src=0)
    return bool(torch.isfinite(out).all()) and out.abs().sum().item() > 0, (total - out).abs().max().item()


@pytest.mark.parametrize("version", [1, 2])
def test_model_without_weights_is_initialised_the_same_on_all_ranks(two_ranks: RankPool, version: int) -> None:
    for sane, difference in two_ranks.run(no_weights_anywhere, version):
        assert sane
        assert difference == 0.0


# Accumulation


def accumulated(version: int, pattern: str | None) -> tuple[list[float], list[float]]:
    def two_halves(model: nn.Module, optimizer: torch.optim.Optimizer, cut: Any, quiet: Any) -> list[float]:
        losses = []
        for step in range(STEPS):
            with quiet(model):
                (loss_of(model, cut(batch(2 * step))) / 2).backward()
            loss = loss_of(model, cut(batch(2 * step + 1))) / 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
        return losses

    from contextlib import nullcontext

    alone_model = build()
    alone = two_halves(alone_model, adamw(alone_model.parameters()), lambda ids: ids, nullcontext)
    model = build()
    fields = {"fsdp_version": version, "ignored_modules": pattern}
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    return alone, two_halves(model, optimizer, my_part, fsdplaunch.no_sync)


@pytest.mark.parametrize("pattern", [None, r"layers\.1"])
@pytest.mark.parametrize("version", [1, 2])
def test_accumulation_without_sync_equals_accumulation_alone(
    two_ranks: RankPool, version: int, pattern: str | None
) -> None:
    alone, sharded = two_ranks.run(accumulated, version, pattern)[0]
    assert largest_difference(alone, sharded) < 1e-5


# Other policies


def by_function(version: int, kind: str) -> tuple[float, int]:
    from functools import partial

    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

    policies: dict[str, Any] = {
        "predicate": lambda module: isinstance(module, Norm),
        "torch function": partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        "torch object": ModuleWrapPolicy({Block}),
    }
    alone = train_alone(build(), STEPS)
    model = build()
    fields = {"fsdp_version": version, "auto_wrap_policy": policies[kind]}
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    from fsdplaunch.runtime.sharding.registry import registered

    prepared = registered(model)
    assert prepared is not None
    return largest_difference(alone, train_sharded(model, optimizer, STEPS)), len(prepared.units)


@pytest.mark.parametrize(("kind", "units"), [("predicate", 7), ("torch function", 3), ("torch object", 3)])
def test_wrap_policy_given_as_a_function_is_used(two_ranks: RankPool, kind: str, units: int) -> None:
    difference, made = two_ranks.run(by_function, 2, kind)[0]
    assert difference < 1e-5
    assert made == units


# One rank


def on_one_rank(version: int) -> float:
    alone = train_alone(build(), STEPS)
    model = build()
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(fsdp_version=version))
    return largest_difference(alone, train_sharded(model, optimizer, STEPS))


@pytest.mark.parametrize("version", [1, 2])
def test_one_rank_trains_as_alone(version: int) -> None:
    pool = RankPool(1)
    try:
        assert pool.run(on_one_rank, version)[0] < 1e-5
    finally:
        pool.stop()


# Tensors of every kind, and what is left of the full ones


class Odd(nn.Module):
    """Buffers in formats that not every backend sends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for number, dtype in enumerate(
            [torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.int64]
        ):
            self.register_buffer(
                f"odd{number}", torch.ones(3).to(dtype) if dist.get_rank() else torch.zeros(3).to(dtype)
            )
        self.register_buffer("single", torch.tensor(dist.get_rank(), dtype=torch.int16))
        self.register_buffer("spread", torch.full((1, 3), dist.get_rank()).expand(2, 3))
        self.register_buffer("none", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


def odd_buffers(version: int) -> list[float]:
    model = fsdplaunch.prepare(Odd(), plugin=plugin(fsdp_version=version))
    return [buffer.to(torch.complex64).abs().sum().item() for buffer in model.buffers()]


@pytest.mark.parametrize("version", [1, 2])
def test_buffers_of_every_dtype_reach_all_ranks(two_ranks: RankPool, version: int) -> None:
    for sums in two_ranks.run(odd_buffers, version):
        assert sums == [0.0] * 8


def full_tensors_left(version: int) -> int:
    """How many of the full parameters are alive after sharding, with nothing of the user's holding them."""
    import gc
    import weakref

    model = build()
    old = [weakref.ref(param) for param in model.parameters()]
    model = fsdplaunch.prepare(model, plugin=plugin(fsdp_version=version))
    gc.collect()
    kept = {id(param) for param in model.parameters()}
    return sum(ref() is not None and id(ref()) not in kept for ref in old)


@pytest.mark.parametrize("version", [1, 2])
def test_no_full_parameter_outlives_sharding(two_ranks: RankPool, version: int) -> None:
    assert two_ranks.run(full_tensors_left, version) == [0, 0]
