"""Norms and clipping on shards equal those on the full gradient."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdplaunch
from fsdplaunch.runtime.api.gradients import clip_grad_value_
from tests.distributed.pool import RankPool
from tests.distributed.tiny import batch, build, loss_of, my_part, plugin

ORDERS = (2.0, float("inf"))
HYBRID = {"fsdp_version": 2, "sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP1 flat": (2, {"fsdp_version": 1, "use_orig_params": False}),
    "with ignored": (2, {"fsdp_version": 2, "ignored_modules": r"layers\.0"}),
    "each replica once": (4, HYBRID),
}


def norms(fields: dict[str, Any]) -> list[tuple[list[float], list[float], bool]]:
    """For each order and both ways to give parameters: norms before and after clipping, alone and sharded."""
    found = []
    for order in ORDERS:
        for as_model in (True, False):
            alone, model = build(), fsdplaunch.prepare(build(), plugin=plugin(**fields))
            loss_of(alone, batch(0)).backward()
            loss_of(model, my_part(batch(0))).backward()
            given = model if as_model else list(model.parameters())
            expected = [nn.utils.clip_grad_norm_(alone.parameters(), most, order) for most in (0.1, 1e9)]
            sharded = [fsdplaunch.clip_grad_norm_(given, most, order) for most in (0.1, 1e9)]
            plain = not any(isinstance(norm, DTensor) for norm in sharded)
            found.append(([norm.item() for norm in expected], [norm.item() for norm in sharded], plain))
    return found


@pytest.mark.parametrize(("ranks", "fields"), CASES.values(), ids=CASES, indirect=["ranks"])
def test_norm_of_shards_is_the_norm_of_the_full_gradient(ranks: RankPool, fields: dict[str, Any]) -> None:
    for answers in ranks.run(norms, fields):
        assert len(answers) == 4
        for expected, sharded, plain in answers:
            assert sharded == pytest.approx(expected, rel=1e-5)
            assert plain


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
