"""`describe` says how a model is sharded, and what looks wrong is refused instead of described."""

import json
from dataclasses import asdict
from typing import Any

import pytest

import fsdplaunch
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from tests.distributed.pool import RankPool
from tests.distributed.tiny import build, plugin

SIZES = {"embed": 37 * 16, "head": 37 * 16, "norm": 16, "block": 32 + 4 * 16 * 16 + 3 * 16 * 32}
TOTAL = SIZES["embed"] + SIZES["head"] + SIZES["norm"] + 3 * SIZES["block"]


def described(fields: dict[str, Any], options: dict[str, Any], frozen: bool = False) -> tuple[Any, list[str]]:
    model: Any = build(**options)
    if frozen:
        model.embed.weight.requires_grad_(False)
    notes: list[str] = []
    say, messages.say = messages.say, notes.append
    try:
        model = fsdplaunch.prepare(model, plugin=plugin(**fields))
    finally:
        messages.say = say
    found = fsdplaunch.describe(model)
    assert notes == [found.line()]
    return found, found.line().split("; ")


def test_units_and_remainder_add_up_to_the_model(two_ranks: RankPool) -> None:
    found, notes = two_ranks.run(described, {"fsdp_version": 1, "mixed_precision_policy": "bf16"}, {})[0]
    assert [(unit.name, unit.kind, unit.parameters) for unit in found.units] == [
        (f"layers.{number}", "Block", SIZES["block"]) for number in range(3)
    ]
    assert found.root.parameters == TOTAL - 3 * SIZES["block"]
    assert (found.parameters, found.trained, found.kept) == (TOTAL, TOTAL, {"float32": TOTAL})
    assert {(unit.compute, unit.reduce) for unit in found.units} == {("bfloat16", "float32")}
    assert (found.model, found.version, found.strategy) == ("TinyLM", 1, "FULL_SHARD")
    assert (found.mesh, found.device) == ({"dp_shard": 2}, "cpu")
    assert all(unit.reshard_after_forward is True for unit in found.units)
    assert notes[0] == (
        "sharded TinyLM: 3 x Block, 8.976 k parameters, FSDP1 FULL_SHARD over 2 ranks, "
        "fp32 kept, bf16 compute, fp32 reduce"
    )
    json.dumps(asdict(found))


def test_everything_out_of_the_ordinary_is_described(two_ranks: RankPool) -> None:
    fields = {
        "fsdp_version": 2,
        "ignored_modules": r"layers\.0\.feed_forward",
        "activation_checkpointing": True,
        "activation_checkpointing_every": 3,
        "forward_prefetch": True,
    }
    found, notes = two_ranks.run(described, fields, {"tied": True}, True)[0]
    assert found.tied == (("embed.weight", "head.weight"),)
    assert found.ignored == ("layers.0.feed_forward",)
    assert found.unsharded == tuple(f"layers.0.feed_forward.{name}.weight" for name in ("down", "gate", "up"))
    assert found.checkpointed == ("layers.2",)
    assert found.forward_prefetch
    assert found.parameters - found.trained == SIZES["embed"]
    assert notes[1:] == [
        "not sharded: layers.0.feed_forward",
        "frozen: 592 parameters",
        "activation checkpointing: 1 modules",
    ]


def test_model_that_was_not_prepared_is_not_described() -> None:
    with pytest.raises(ShardingError, match="this TinyLM was not sharded by prepare"):
        fsdplaunch.describe(build())
