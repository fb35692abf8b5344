"""Sharded training has the losses of the unsharded one: each way to shard, kind of model, and way to train.

All ways of a world size and a version run in one call of the ranks; each is a test.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import fsdplaunch
from fsdplaunch.runtime.inspection import clean_name
from tests.distributed.pool import RankPool
from tests.distributed.tiny import (
    VOCAB,
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

STEPS = 5
TOLERANCE = 2e-5
Cut = Callable[[torch.Tensor], torch.Tensor]
FROZEN = ("embed.weight", "layers.1.attention.qkv.weight")


# Models


def tied() -> nn.Module:
    return build(tied=True)


def frozen() -> nn.Module:
    model = build()
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


def with_adapters() -> nn.Module:
    """Everything frozen but a few small layers."""
    model = build().requires_grad_(False)
    for layer in model.layers:
        layer.feed_forward.up.weight.requires_grad_(True)
    return model


class Scaled(nn.Module):
    """A scalar, a parameter of one row and one of few rows beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.row = nn.Parameter(torch.zeros(1, 37))
        self.few = nn.Parameter(torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids) * self.scale + self.row + self.few.sum()


class Casting(nn.Module):
    """Norms in fp64 inside of a fp32 model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        for layer in self.inner.layers:
            layer.attention_norm.double()
            layer.attention_norm.register_forward_pre_hook(lambda _, args: (args[0].double(),))
            layer.attention_norm.register_forward_hook(lambda *given: given[-1].float())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids)


def transformers_model(family: str) -> Callable[[], nn.Module]:
    """Return what builds a small model of transformers."""

    def make() -> nn.Module:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        torch.manual_seed(0)
        config, model, options = FAMILIES[family]
        return getattr(transformers, model)(getattr(transformers, config)(vocab_size=64, **options))

    return make


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "LlamaDecoderLayer": ("LlamaConfig", "LlamaForCausalLM", SIZES),
    "MixtralDecoderLayer": ("MixtralConfig", "MixtralForCausalLM", SIZES | EXPERTS),
}
"""By the class of their blocks."""


# What a rank begins with, where that is not the model of the unsharded run


def of_another_seed() -> nn.Module:
    model = build(seed=dist.get_rank())
    model.scale.fill_(1.0 + dist.get_rank())
    return model


def on_rank_0_only() -> nn.Module:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        return build()


def recomputing_by_itself() -> nn.Module:
    """A model of transformers with its own way to compute activations again."""
    model: Any = transformers_model("LlamaDecoderLayer")()
    model.gradient_checkpointing_enable()
    return model


def counting_calls() -> nn.Module:
    model = build()
    model.calls = []
    model.layers[1].attention.register_forward_pre_hook(lambda *_: model.calls.append(1))
    return model


# Ways to train, whole or by each rank's part


def plainly(model: nn.Module, optimizer: Any, cut: Cut) -> list[float]:
    if cut is my_part:
        return train_sharded(model, optimizer, STEPS)
    return train_alone(model, STEPS, make=lambda _: optimizer)


def stepping(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> float:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return mean_over_ranks(loss)


def by_its_own_loss(model: Any, optimizer: Any, cut: Cut) -> list[float]:
    losses = []
    for step in range(STEPS):
        ids = torch.randint(1, 64, (8, 10), generator=torch.Generator().manual_seed(step % 3))
        losses.append(stepping(model, optimizer, model(input_ids=cut(ids), labels=cut(ids)).loss))
    return losses


def in_two_halves_without_sync(model: nn.Module, optimizer: Any, cut: Cut) -> list[float]:
    losses = []
    for step in range(STEPS):
        with fsdplaunch.no_sync(model) if cut is my_part else nullcontext():
            (loss_of(model, cut(batch(2 * step))) / 2).backward()
        losses.append(stepping(model, optimizer, loss_of(model, cut(batch(2 * step + 1))) / 2))
    return losses


# Optimizers, and when they are made


def adamw_of(model: nn.Module) -> Any:
    return adamw([param for param in model.parameters() if param.requires_grad])


def adagrad(model: nn.Module) -> Any:
    return torch.optim.Adagrad(model.parameters(), lr=0.15, initial_accumulator_value=0.1)


def grouped(model: nn.Module) -> Any:
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    plain = [p for n, p in model.named_parameters() if "norm" in n]
    return torch.optim.AdamW([{"params": decayed, "lr": 1e-2}, {"params": plain, "lr": 5e-2, "weight_decay": 0.0}])


Made = tuple[Any, Any]


def together(model: nn.Module, make: Any, chosen: Any) -> Made:
    optimizer, model = fsdplaunch.prepare(make(model), model, plugin=chosen)
    return model, optimizer


def with_a_scheduler(model: nn.Module, make: Any, chosen: Any) -> Made:
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scheduler, model, optimizer = fsdplaunch.prepare(scheduler, model, optimizer, plugin=chosen)
    optimizer.scheduler = scheduler
    return model, optimizer


def made_before_and_prepared_later(model: nn.Module, make: Any, chosen: Any) -> Made:
    optimizer = make(model)
    model = fsdplaunch.prepare(model, plugin=chosen)
    return model, fsdplaunch.prepare(optimizer, plugin=chosen)


# What is looked at afterwards


def units(model: Any, _: Any) -> Any:
    return sum(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()) - 1


def kinds_of_units(model: Any, _: Any) -> Any:
    return {unit.kind for unit in fsdplaunch.describe(model).units}


def is_one_parameter(model: Any, _: Any) -> Any:
    if isinstance(model, FullyShardedDataParallel):
        return sum("embed" in name or "head" in name for name, _ in model.named_parameters()) == 1
    return model.embed.weight is model.head.weight


def calls_and_names(model: Any, _: Any) -> Any:
    names = sorted(clean_name(name) for name, _ in model.named_parameters())
    return len(model.calls), names == sorted(name for name, _ in build().named_parameters())


def is_wrapped(model: Any, _: Any) -> Any:
    return any(isinstance(module, CheckpointWrapper) for module in model.modules())


def frozen_did_not_move(model: Any, _: Any) -> Any:
    with fsdplaunch.summon_full_params(model, writeback=False):
        named = dict(fsdplaunch.named_parameters(model))
        return all(torch.equal(named[name], build().get_parameter(name)) for name in FROZEN)


def ignored_is_whole_and_equal(model: Any, _: Any) -> Any:
    weight = dict(fsdplaunch.named_parameters(model))["layers.0.feed_forward.up.weight"]
    others = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weight.detach())
    return tuple(weight.shape) == (32, 16) and all(torch.equal(others[0], other) for other in others)


def rates_after_a_step(_: Any, optimizer: Any) -> Any:
    optimizer.scheduler.step()
    return [group["lr"] for group in optimizer.param_groups]


def state_is_sharded(_: Any, optimizer: Any) -> Any:
    pairs = [(param, state["sum"]) for param, state in optimizer.state.items()]
    return all(not isinstance(p, DTensor) or state.placements == p.placements for p, state in pairs)


# The table


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train.

    Attributes:
        fields: Of the plugin.
        make: Builds the model of the unsharded run.
        begin: Builds the model of a rank; the same where there is none.
        optimizer: Makes it for a model.
        ready: Gives both to `prepare`.
        train: Trains, and returns the losses.
        look: What is looked at afterwards.
        found: What it finds.
        versions: Of FSDP.
        sizes: Over how many ranks.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], nn.Module] = build
    begin: Callable[[], nn.Module] | None = None
    optimizer: Callable[[nn.Module], Any] = adamw_of
    ready: Callable[[nn.Module, Any, Any], Made] = together
    train: Callable[[nn.Module, Any, Cut], list[float]] = plainly
    look: Callable[[Any, Any], Any] = lambda *_: None
    found: Any = None
    versions: tuple[int, ...] = (1, 2)
    sizes: tuple[int, ...] = (2,)


BY_SIZE = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}
NO_UNITS = {"auto_wrap_policy": "NO_WRAP"}
HALF = {"dp_replicate_size": 2}
RECOMPUTED = {"activation_checkpointing": True}
RANK_0 = {"cpu_ram_efficient_loading": True}
IGNORED = {"ignored_modules": r"layers\.0\.feed_forward"}
WAYS: dict[str, Way] = {
    "found units": Way(look=units, found=3, sizes=(1, 2, 4)),
    "units by size": Way(fields=BY_SIZE, look=units, found=6),
    "no units": Way(fields=NO_UNITS, look=units, found=0),
    "gathered in between": Way(fields={"sharding_strategy": "SHARD_GRAD_OP"}),
    "not sharded": Way(fields={"sharding_strategy": "NO_SHARD"}),
    "gathered for two ranks": Way(fields={"reshard_after_forward": 2}, versions=(2,), sizes=(4,)),
    "hybrid": Way(fields={"sharding_strategy": "HYBRID_SHARD", **HALF}, sizes=(4,)),
    "hybrid, gathered": Way(fields={"sharding_strategy": "HYBRID_SHARD_ZERO2", **HALF}, sizes=(4,)),
    "prefetching": Way(fields={"forward_prefetch": True}),
    "tied": Way(make=tied, look=is_one_parameter, found=True),
    "recomputed": Way(fields=RECOMPUTED, begin=counting_calls, look=calls_and_names, found=(2 * STEPS, True)),
    "frozen": Way(make=frozen, look=frozen_did_not_move, found=True),
    "adapters": Way(make=with_adapters),
    "scalar and few rows": Way(make=Scaled),
    "two dtypes": Way(make=Casting, versions=(2,)),  # FSDP1 clips no fp64 gradients
    "ignored": Way(fields=IGNORED, begin=of_another_seed, look=ignored_is_whole_and_equal, found=True),
    "weights on rank 0": Way(fields=RANK_0, begin=on_rank_0_only),
    "accumulated without sync": Way(fields=IGNORED, train=in_two_halves_without_sync),
    "optimizer prepared later": Way(ready=made_before_and_prepared_later),
    "groups and scheduler": Way(
        optimizer=grouped, ready=with_a_scheduler, look=rates_after_a_step, found=[5e-3, 2.5e-2], versions=(2,)
    ),
    "adagrad": Way(optimizer=adagrad, look=state_is_sharded, found=True),
    "flat": Way(fields={"use_orig_params": False}, optimizer=adagrad, versions=(1,)),
    **{
        f"recomputed {by}": Way(
            fields=RECOMPUTED,
            make=transformers_model("LlamaDecoderLayer"),
            begin=begin,
            train=by_its_own_loss,
            look=is_wrapped,
            found=begin is None,
        )
        for by, begin in (("by transformers", recomputing_by_itself), ("in transformers' model", None))
    },
    **{
        kind: Way(make=transformers_model(kind), train=by_its_own_loss, look=kinds_of_units, found={kind})
        for kind in FAMILIES
    },
}


@cache
def losses_alone(make: Any, optimizer: Any, train: Any) -> list[float]:
    model = make()
    return train(model, optimizer(model), lambda ids: ids)


def outcome(way: Way, version: int) -> tuple[float, float, Any]:
    """How far the losses are from those of the unsharded run, how far these fell, and what is found."""
    torch.manual_seed(0)
    alone = losses_alone(way.make, way.optimizer, way.train)
    chosen = plugin(fsdp_version=version, **way.fields)
    torch.manual_seed(0)
    model, optimizer = way.ready((way.begin or way.make)(), way.optimizer, chosen)
    sharded = way.train(model, optimizer, my_part)
    apart = max(abs(a - b) for a, b in zip(alone, sharded, strict=True))
    return apart, alone[0] - alone[-1], way.look(model, optimizer)


def outcomes(version: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names(version, dist.get_world_size()):
        try:
            found[name] = outcome(WAYS[name], version)
        except Exception:
            found[name] = traceback.format_exc()
    return found


def names(version: int, size: int) -> Iterator[str]:
    return (name for name, way in WAYS.items() if version in way.versions and size in way.sizes)


@pytest.fixture(scope="module")
def trained(one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool) -> Callable[[int, int], dict[str, Any]]:
    """Return a function that runs all ways of a size and a version, once."""

    @cache
    def run(version: int, size: int) -> dict[str, Any]:
        pool = {1: one_rank, 2: two_ranks, 4: four_ranks}[size]
        return pool.run(outcomes, version, timeout=200)[0]

    return run


@pytest.mark.parametrize(
    ("size", "version", "name"),
    [(size, version, name) for size in (1, 2, 4) for version in (1, 2) for name in names(version, size)],
)
def test_way_of_training_equals_training_alone(trained: Any, size: int, version: int, name: str) -> None:
    found = trained(version, size)[name]
    assert not isinstance(found, str), found
    apart, fell, seen = found
    assert apart < TOLERANCE
    assert fell > 0.05 or name == "adapters", "the run must learn, or equal losses say little"
    assert seen == WAYS[name].found


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
        losses.append(stepping(first, optimizer, loss))
    return alone, losses


@pytest.mark.parametrize("version", [1, 2])
def test_two_models_in_any_order_train_with_one_optimizer(two_ranks: RankPool, version: int) -> None:
    alone, sharded = two_ranks.run(two_models, version)[0]
    assert sharded == pytest.approx(alone, abs=TOLERANCE)


# Models that start without weights, buffers, and what is left of full tensors


class Odd(nn.Module):
    """Buffers in dtypes that not every backend sends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        dtypes = (torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.int64)
        for number, dtype in enumerate(dtypes):
            self.register_buffer(f"odd{number}", torch.full((3,), float(dist.get_rank())).to(dtype))
        self.register_buffer("single", torch.tensor(dist.get_rank(), dtype=torch.int16))
        self.register_buffer("spread", torch.full((1, 3), dist.get_rank()).expand(2, 3))
        self.register_buffer("none", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


def started(version: int) -> tuple[list[float], int, bool, list[float]]:
    """Sums of buffers; full parameters that are still alive; what a model without weights computes."""
    import gc
    import weakref

    odd = fsdplaunch.prepare(Odd(), plugin=plugin(fsdp_version=version))
    sums = [buffer.to(torch.complex64).abs().sum().item() for buffer in odd.buffers()]
    model = build()
    old = [weakref.ref(param) for param in model.parameters()]
    model = fsdplaunch.prepare(model, plugin=plugin(fsdp_version=version))
    gc.collect()
    kept = {id(param) for param in model.parameters()}
    left = sum(ref() is not None and id(ref()) not in kept for ref in old)
    with torch.device("meta"):
        empty: Any = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))
    out = fsdplaunch.prepare(empty, plugin=plugin(fsdp_version=version))(torch.ones(2, 8))
    return sums, left, bool(torch.isfinite(out).all()) and out.abs().sum().item() > 0, out.flatten().tolist()


@pytest.mark.parametrize("version", [1, 2])
def test_ranks_start_alike_and_keep_no_full_parameter(two_ranks: RankPool, version: int) -> None:
    first, second = two_ranks.run(started, version)
    assert first == second == ([0.0] * 8, 0, True, first[-1])
