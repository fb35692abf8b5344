"""Norms and clipping on shards equal those on the full gradient."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdplaunch
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.api.gradients import clip_grad_value_
from tests.distributed.pool import RankPool
from tests.distributed.tiny import batch, build, loss_of, my_part, plugin


def norms(fields: dict[str, Any], order: float, as_model: bool) -> tuple[float, float, float, float, bool]:
    """Norm alone, norm sharded, the same after clipping to 0.1, and whether a plain tensor came back."""
    alone = build()
    loss_of(alone, batch(0)).backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1, order)
    model = fsdplaunch.prepare(build(), plugin=plugin(**fields))
    loss_of(model, my_part(batch(0))).backward()
    given = model if as_model else list(model.parameters())
    found = fsdplaunch.clip_grad_norm_(given, 0.1, order)
    left_alone = nn.utils.clip_grad_norm_(alone.parameters(), 1e9, order)
    left = fsdplaunch.clip_grad_norm_(given, 1e9, order)
    plain = isinstance(found, torch.Tensor) and not isinstance(found, DTensor)
    return expected.item(), found.item(), left_alone.item(), left.item(), plain


CASES: dict[str, dict[str, Any]] = {
    "FSDP1": {"fsdp_version": 1},
    "FSDP1 flat": {"fsdp_version": 1, "use_orig_params": False},
    "FSDP2": {"fsdp_version": 2},
    "with ignored": {"fsdp_version": 2, "ignored_modules": r"layers\.0"},
}


@pytest.mark.parametrize("as_model", [True, False])
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("case", CASES)
def test_norm_of_shards_is_the_norm_of_the_full_gradient(
    two_ranks: RankPool, case: str, order: float, as_model: bool
) -> None:
    for expected, found, left_alone, left, plain in two_ranks.run(norms, CASES[case], order, as_model):
        assert found == pytest.approx(expected, rel=1e-5)
        assert left == pytest.approx(left_alone, rel=1e-5)
        assert plain


def test_norm_under_hybrid_shard_counts_each_copy_once(four_ranks: RankPool) -> None:
    fields = {"fsdp_version": 2, "sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2}
    for expected, found, _, _, _ in four_ranks.run(norms, fields, 2.0, True):
        assert found == pytest.approx(expected, rel=1e-5)


def part_of_a_model() -> str:
    model = fsdplaunch.prepare(build(), plugin=plugin(fsdp_version=1))
    loss_of(model, my_part(batch(0))).backward()
    try:
        fsdplaunch.clip_grad_norm_(list(model.parameters())[:2], 1.0)
    except ShardingError as error:
        return str(error)
    return "nothing was raised"


def test_norm_of_some_fsdp1_parameters_is_refused(two_ranks: RankPool) -> None:
    assert "only some parameters" in two_ranks.run(part_of_a_model)[0]


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def around_a_model() -> str:
    model = fsdplaunch.prepare(build(), plugin=plugin(fsdp_version=1))
    loss_of(model, my_part(batch(0))).backward()
    try:
        fsdplaunch.clip_grad_norm_(Outer(model), 1.0)
    except ShardingError as error:
        return str(error)
    return "nothing was raised"


def test_norm_of_a_module_around_an_fsdp1_model_is_refused(two_ranks: RankPool) -> None:
    assert "only some of Outer is sharded" in two_ranks.run(around_a_model)[0]


def limited(version: int) -> tuple[float, float]:
    model = fsdplaunch.prepare(build(), plugin=plugin(fsdp_version=version))
    loss_of(model, my_part(batch(0))).backward()
    clip_grad_value_(model, 1e-3)
    values = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    flat = torch.cat([value.flatten() for value in values if value is not None])
    return flat.min().item(), flat.max().item()


@pytest.mark.parametrize("version", [1, 2])
def test_values_are_limited_in_place(two_ranks: RankPool, version: int) -> None:
    for low, high in two_ranks.run(limited, version):
        assert (low, high) == (pytest.approx(-1e-3), pytest.approx(1e-3))
