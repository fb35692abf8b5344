"""A sharded run has the losses of the unsharded one."""

from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

import fsdplaunch
from tests.distributed.pool import RankPool
from tests.distributed.tiny import adamw, build, plugin, train_alone, train_sharded

STEPS = 12
TOLERANCE = 1e-5
WRAPS: dict[str, dict[str, Any]] = {
    "named": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Block"]},
    "found": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "size": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000},
    "whole": {"auto_wrap_policy": "NO_WRAP"},
}
UNITS = {"named": 3, "found": 3, "size": 6, "whole": 0}


def run_both(fields: dict[str, Any], options: dict[str, Any]) -> tuple[list[float], list[float], int]:
    """Losses alone and sharded, and how many units were made below the model."""
    alone = train_alone(build(**options), STEPS)
    model = build(**options)
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    kind = FullyShardedDataParallel if fields["fsdp_version"] == 1 else FSDPModule
    units = sum(isinstance(module, kind) for module in model.modules()) - 1
    return alone, train_sharded(model, optimizer, STEPS), units


def largest_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_losses_sharded_equal_unsharded(ranks: RankPool, version: int, wrap: str) -> None:
    alone, sharded, units = ranks.run(run_both, {"fsdp_version": version, **WRAPS[wrap]}, {})[0]
    assert largest_difference(alone, sharded) < TOLERANCE
    assert alone[-1] < alone[0] - 0.1, "the run must learn, or equal losses say little"
    assert units == UNITS[wrap]
