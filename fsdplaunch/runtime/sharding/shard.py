"""Shard one model: the fixed order of work between the user's model and the sharded one."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.config.environment import decode
from fsdplaunch.features import LAYERS, SEQUENCES, feature
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection import (
    named_parameters,
    parameters_listed_by_torch,
    parameters_of,
    tied_names,
)
from fsdplaunch.runtime.inspection.describe import announce, describe
from fsdplaunch.runtime.plugin import FullyShardedDataParallelPlugin
from fsdplaunch.runtime.sharding import checks, compute, fsdp1, fsdp2
from fsdplaunch.runtime.sharding.gradients import reattach_hooks_to_shards
from fsdplaunch.runtime.sharding.ignored import IgnoredParts, find_ignored, separate_dtypes
from fsdplaunch.runtime.sharding.materialize import Materializer
from fsdplaunch.runtime.sharding.mesh import ShardTarget, is_fake, tensor_mesh
from fsdplaunch.runtime.sharding.optimizers import keep_parameter_attributes, note_full_parameters
from fsdplaunch.runtime.sharding.registry import ReplicatedParams, ShardedModel, register_model
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.sharding.wrap import check_root_unit, plan_units
from fsdplaunch.runtime.sharding_watch import begin_sharding, mark_sharded

Defer = Callable[..., Materializer]
"""What makes a Materializer for a model, its settings, and what every Materializer is given."""


def shard_model(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, place: ShardTarget, deferred: Defer | None = None
) -> nn.Module:
    """Shard a model as the plugin sets; see `prepare` for the order of work.

    Returns the model itself (FSDP2) or the wrapper around it (FSDP1). `deferred` makes the materializer of a model
    whose values come later.
    """
    begin_sharding("prepare")
    settings = plugin.settings()
    checks.check_settings(settings, place.mesh)
    checks.check_model(model, settings.version)
    # The order matters: each step sees what the ones before have changed.
    methods = compute.forward_methods(model, settings)
    tied, total = tied_names(model), sum(param.numel() for param in parameters_of(model))
    out = find_ignored(model, settings)
    checks.check_dense(model, out.below())
    home = note_full_parameters(model)
    converted = compute.convert_to_float8(model, settings, out)
    skipped = {id(param) for param in out.parameters()}
    units = separate_dtypes(model, plan_units(model, settings, out.below()), settings, skipped)
    check_root_unit(model, units, settings, skipped)
    axis, split = tensor_mesh(place.mesh), None
    if axis is not None:  # each rank has a part of every layer
        split = feature(LAYERS).split_layers(model, dict(settings.tensor_plan), axis, out.below())
    sequences = None if place.context is None else _split_sequences(model, settings, place.context)
    with keep_parameter_attributes(model):
        materializer = _materializer(model, settings, place, out, deferred, split)
        if settings.activation_checkpointing:
            units = compute.checkpoint_blocks(model, units, settings, place.device)
        compute.compile_forwards(units.values(), settings, regional=True)
        shard = fsdp1.shard if settings.version == 1 else fsdp2.shard
        with reattach_hooks_to_shards(model), parameters_listed_by_torch(model):
            sharded = shard(model, units, settings=settings, mesh=place.mesh, materializer=materializer, out=out)
        materializer.fill(sharded)
        home.append(weakref.ref(sharded))
        compute.compile_forwards([model], settings, regional=False)
        compute.register(sharded, model, methods)
    unsharded = out.parameters()
    ids = {id(param) for param in unsharded}
    trained = [param for param in unsharded if param.requires_grad]
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
        replicas=ReplicatedParams(trained, place.mesh) if trained else None,
        split=split,
        sequences=sequences,
    )
    checks.check_sharded_model(sharded, prepared, total=total)
    register_model(sharded, prepared)
    if not place.layout_only and not is_fake(place.mesh):
        # The first passes show whether ranks that split something compute what one would.
        if sequences is not None:
            feature(SEQUENCES).compare_first_pass(sharded, sequences, place.device, settings.dtypes.param)
        if split is not None:
            split.expect_same_inputs(sharded, place.device, settings.dtypes.param)
    mark_sharded("prepare")
    announce(describe(sharded))
    return sharded


def _split_sequences(model: nn.Module, settings: Settings, axis: DeviceMesh) -> Any:
    strategy = decode().parallelism_config.parallelism_config_cp_comm_strategy
    if strategy != "allgather":
        messages.say(
            f"cp_comm_strategy {strategy} is for accelerate's attention, not for this one:"
            " see sharding.context_parallel_attention"
        )
    return feature(SEQUENCES).split_blocks(model, settings.block_classes, axis, settings.context_attention)


def _materializer(
    model: nn.Module, settings: Settings, place: ShardTarget, out: IgnoredParts, deferred: Defer | None, split: Any
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
    if deferred is not None and not place.layout_only:
        materializer = deferred(model, settings=settings, **arguments)
    else:
        materializer = Materializer(model, **arguments)
        if not materializer.send and not place.layout_only:
            checks.check_same_values(materializer.entries, place.mesh, place.device)
    for module in out.modules.values():
        materializer.materialize(module)
    due = [each for each in materializer.entries if not each.materialized and not each.spec[0]]
    materializer.materialize_entries([each for each in due if isinstance(each.tensor, nn.Parameter)])
    return materializer
