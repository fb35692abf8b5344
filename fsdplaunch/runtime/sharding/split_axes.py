"""The axes beside FSDP's: ranks that split each layer, and ranks that split each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.config.environment import decode
from fsdplaunch.errors import ShardingError
from fsdplaunch.features import SEQUENCES, TENSOR_FORWARD, TENSOR_PLAN, TENSOR_SCALING, feature
from fsdplaunch.name_lists import listed
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.sharding.ignored import IgnoredParts
from fsdplaunch.runtime.sharding.mesh import shard_group, tensor_mesh
from fsdplaunch.runtime.sharding.settings import Settings

if TYPE_CHECKING:
    from fsdplaunch.runtime.context_parallel.split_blocks import SplitSequences
    from fsdplaunch.runtime.tensor_parallel.split_plan import SplitPlan


def split_layers(model: nn.Module, settings: Settings, mesh: DeviceMesh, out: IgnoredParts) -> SplitPlan | None:
    """Decide what ranks split of each layer, and give those layers their forwards; None where they split none.

    Raises:
        ShardingError: The plan does not fit the model, or names what is ignored.
    """
    axis = tensor_mesh(mesh)
    if axis is None:
        return None
    configured, shards = dict(settings.tensor_plan), shard_group(mesh).size()
    plan: SplitPlan = feature(TENSOR_PLAN).build_plan(model, configured, axis, shards=shards)
    ignored = [plan.names[module] for module in plan.modules if module in out.below()]
    if ignored:
        msg = f"{listed(ignored, 3)} cannot be split and ignored"
        raise ShardingError(
            msg, hint="take it out of fsdp_ignored_modules, or out of sharding.tensor_parallel_plan"
        )
    feature(TENSOR_FORWARD).split_forwards(plan)
    return plan


def split_sequences(model: nn.Module, settings: Settings, axis: DeviceMesh | None) -> SplitSequences | None:
    """Let the model's blocks compute on pieces of the sequences; None where no ranks split them."""
    if axis is None:
        return None
    strategy = decode().parallelism_config.parallelism_config_cp_comm_strategy
    if strategy != "allgather":
        messages.say(
            f"cp_comm_strategy {strategy} is for accelerate's attention, not for this one:"
            " see sharding.context_parallel_attention"
        )
    apply: Any = feature(SEQUENCES)
    made: SplitSequences = apply.split_blocks(model, settings.block_classes, axis, settings.context_attention)
    return made


def begin_passes(
    model: nn.Module,
    split: SplitPlan | None,
    sequences: SplitSequences | None,
    device: torch.device,
    computes_in: torch.dtype | None,
) -> None:
    """Let the first passes of the model show that ranks which split something compute what one would.

    Args:
        model: Sharded.
        split: How its layers are split.
        sequences: How its sequences are.
        device: Where this worker computes.
        computes_in: The dtype that parameters are gathered in; None for their own.
    """
    if sequences is not None:
        feature(SEQUENCES).compare_first_pass(model, sequences, device, computes_in)
    if split is not None:
        feature(TENSOR_SCALING).agree_on_overflows()
        split.expect_same_inputs(model, device, computes_in)
