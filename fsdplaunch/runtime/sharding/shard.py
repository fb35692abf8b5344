"""Shard one model: the fixed order of work between the user's model and the sharded one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.config.environment import decode
from fsdplaunch.features import LAYERS, SEQUENCES, feature
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection.describe import announce, describe
from fsdplaunch.runtime.inspection.parameters import (
    named_parameters,
    parameters_listed_by_torch,
    parameters_of,
    tied_names,
)
from fsdplaunch.runtime.plugin import FullyShardedDataParallelPlugin
from fsdplaunch.runtime.sharding import fsdp2
from fsdplaunch.runtime.sharding.checks import (
    check_dense,
    check_model,
    check_same_values,
    check_settings,
    check_sharded_model,
)
from fsdplaunch.runtime.sharding.compute import (
    checkpoint_blocks,
    compile_blocks,
    compile_model,
    convert_to_float8,
    forward_methods,
    register,
)
from fsdplaunch.runtime.sharding.gradients import reattach_hooks_to_shards
from fsdplaunch.runtime.sharding.ignored import IgnoredParts, find_ignored, separate_dtypes
from fsdplaunch.runtime.sharding.materialize import Materializer
from fsdplaunch.runtime.sharding.mesh import ShardTarget, is_fake, tensor_mesh
from fsdplaunch.runtime.sharding.optimizers import keep_parameter_attributes, note_full_parameters
from fsdplaunch.runtime.sharding.registry import ShardedModel, keep_equal, register_model
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.sharding.wrap import Units, check_root_unit, plan_units
from fsdplaunch.runtime.sharding_watch import begin_sharding, mark_sharded

if TYPE_CHECKING:
    from fsdplaunch.runtime.context_parallel.split_blocks import SplitSequences
    from fsdplaunch.runtime.tensor_parallel.plan import SplitPlan


Defer = Callable[..., Materializer]
"""What makes a Materializer for a model, its settings, and what every Materializer is given."""


def shard_model(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, place: ShardTarget, deferred: Defer | None = None
) -> nn.Module:
    """Shard a model as the plugin sets; see `prepare` for the order of work.

    Args:
        model: Not sharded yet.
        plugin: How.
        place: Where.
        deferred: Makes the materializer of a model whose values come later; None leaves it those it has.

    Returns:
        The model itself (FSDP2) or the wrapper around it (FSDP1).

    Raises:
        ShardingError: It cannot be done as configured.
    """
    begin_sharding("prepare")
    settings = plugin.settings()
    check_settings(settings, place.mesh)
    check_model(model, settings.version)
    # The order matters: each step sees what the ones before have changed.
    methods = forward_methods(model, settings)
    tied, total = tied_names(model), sum(param.numel() for param in parameters_of(model))
    out = find_ignored(model, settings)
    check_dense(model, out.below())
    home = note_full_parameters(dict(named_parameters(model)))
    converted = convert_to_float8(model, settings, out)
    units = _units(model, settings, out)
    split = split_layers(model, settings, place.mesh, out)
    sequences = split_sequences(model, settings, place.context)
    with keep_parameter_attributes(model):
        materializer = _materializer(model, settings, place, out, deferred, split)
        if settings.activation_checkpointing:
            units = checkpoint_blocks(model, units, settings, place.device)
        compile_blocks(units, settings)
        sharded = _cut(model, units, settings, place, out, materializer)
        home.model = weakref.ref(sharded)
        compile_model(model, settings)
        register(sharded, model, methods)
    unsharded = out.parameters()
    ids = {id(param) for param in unsharded}
    prepared = ShardedModel(
        plugin=plugin,
        settings=settings,
        mesh=place.mesh,
        device=place.device,
        tied=tied,
        units=tuple(units),
        ignored=tuple(out.modules),
        left_out=frozenset(name for name, param in named_parameters(sharded) if id(param) in ids),
        methods=methods,
        converted=converted,
        replicas=keep_equal(unsharded, place.mesh),
        split=split,
        sequences=sequences,
    )
    check_sharded_model(sharded, prepared, total=total)
    register_model(sharded, prepared)
    if not place.layout_only and not is_fake(place.mesh):
        begin_passes(sharded, split, sequences, place.device, settings.dtypes.param)
    mark_sharded("prepare")
    announce(describe(sharded))
    return sharded


def _units(model: nn.Module, settings: Settings, out: IgnoredParts) -> Units:
    skipped = {id(param) for param in out.parameters()}
    units = plan_units(model, settings, out.below())
    units = separate_dtypes(model, units, settings, skipped)
    check_root_unit(model, units, settings, skipped)
    return units


def _materializer(
    model: nn.Module,
    settings: Settings,
    place: ShardTarget,
    out: IgnoredParts,
    deferred: Defer | None,
    split: SplitPlan | None,
) -> Materializer:
    """Return what materializes the model's tensors, with rank 0's values or so that files fill them later.

    It has begun with what is left out: materializing may exchange parameters, and sharding has to know them.
    """
    arguments: dict[str, Any] = {
        "mesh": place.mesh,
        "device": torch.device("meta") if place.layout_only else place.device,
        "master": settings.dtypes.master,
        "frozen_too": settings.version == 1,  # a flat parameter has one dtype
        "ignored": out.modules.values(),
        "init_fn": settings.param_init_fn,
        "send": settings.sync_module_states or settings.ram_efficient,
        "split": None if split is None else split.split_parameter,
    }
    if deferred is None or place.layout_only:
        materializer = Materializer(model, **arguments)
        if not materializer.send and not place.layout_only:
            check_same_values(materializer.entries, place.mesh, place.device)
    else:
        materializer = deferred(model, settings=settings, **arguments)
    for module in out.modules.values():
        materializer.materialize(module)
    materializer.materialize_scalars()
    return materializer


def _cut(
    model: nn.Module,
    units: Units,
    settings: Settings,
    place: ShardTarget,
    out: IgnoredParts,
    materializer: Materializer,
) -> nn.Module:
    """Shard a model by its FSDP version, and fill it."""
    shard: Callable[..., nn.Module] = fsdp2.shard
    if settings.version == 1:
        from fsdplaunch.runtime.sharding import fsdp1  # only where it is used: a worker must start fast

        shard = fsdp1.shard
    with reattach_hooks_to_shards(model), parameters_listed_by_torch(model):
        sharded = shard(
            model,
            units,
            materializer=materializer,
            settings=settings,
            mesh=place.mesh,
            out=out,
            device=place.device,
        )
    materializer.fill(sharded)
    return sharded


def split_layers(model: nn.Module, settings: Settings, mesh: DeviceMesh, out: IgnoredParts) -> SplitPlan | None:
    """Decide what ranks split of each layer, and give those layers their forwards; None where they split none.

    Raises:
        ShardingError: The plan does not fit the model, or names what is ignored.
    """
    axis = tensor_mesh(mesh)
    if axis is None:
        return None
    plan: SplitPlan = feature(LAYERS).split_layers(model, dict(settings.tensor_plan), axis, out.below())
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
    split = feature(SEQUENCES).split_blocks
    sequences: SplitSequences = split(model, settings.block_classes, axis, settings.context_attention)
    return sequences


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
        split.expect_same_inputs(model, device, computes_in)
