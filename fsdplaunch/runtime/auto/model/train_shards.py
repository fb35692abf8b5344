"""Shard the models that an optimizer is built on, and let it train the shards. Rule 1.

Done right after the optimizer's base class has its groups and before the subclass goes on, so that what a subclass
keeps for itself is the shards already. Parameters without a module stay unsharded and equal on all workers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.adopt_model import adopt_model, check_no_gradients, check_not_gathered
from fsdplaunch.runtime.auto.model.find_models import finding_models
from fsdplaunch.runtime.auto.model.who_shards import deciding_when_training_begins
from fsdplaunch.runtime.auto.shards.optimizers import average_closure
from fsdplaunch.runtime.inspection.units import reshard
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.plugin.plugin import ambient_plugin
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.sharding.mesh import shard_target
from fsdplaunch.runtime.sharding.optimizer_params import repoint
from fsdplaunch.runtime.sharding.registry import known_parameters
from fsdplaunch.runtime.sharding.replicated import ReplicatedParams


@contextmanager
def sharding_models(hook_context: HookContext) -> Iterator[None]:
    """Shard models where they are moved, compiled or given to an optimizer, or when training begins. Rule 1."""

    def shard_now(optimizer: Optimizer) -> None:
        regroup(optimizer, hook_context, now=True)

    with (
        finding_models(hook_context),
        training_shards(hook_context),
        deciding_when_training_begins(hook_context.ownership, hook_context.built_optimizers, shard_now),
    ):
        yield


@contextmanager
def training_shards(hook_context: HookContext) -> Iterator[None]:
    """Shard what an optimizer is built on, or given later, and let it train the shards."""
    building: set[int] = set()

    def build(original: Any) -> Any:
        def __init__(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:  # noqa: N807
            for model in list(hook_context.models):
                reshard(model)  # parameters that are read now must be the shards
            building.add(id(self))
            try:
                original(self, params, defaults)
            finally:
                building.discard(id(self))
            hook_context.note_optimizer(self)
            regroup(self, hook_context)

        return __init__

    def extend(original: Any) -> Any:
        def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
            original(self, param_group)
            if id(self) not in building:
                regroup(self, hook_context)

        return add_param_group

    with replaced(Optimizer, "__init__", build), replaced(Optimizer, "add_param_group", extend):
        yield


def regroup(optimizer: Optimizer, hook_context: HookContext, *, now: bool = False) -> None:
    """Shard the models whose parameters an optimizer has, and let it train the shards, if this is ours to do.

    Args:
        optimizer: With its groups.
        hook_context: This worker's.
        now: Whether training begins.

    Raises:
        ShardingError: A model cannot be sharded.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    known = known_parameters()
    new = [p for p in params if id(p) not in known and not hasattr(p, "fsdplaunch_origin")]
    what = f"builds {type(optimizer).__name__}"
    if all(isinstance(p, DTensor) for p in params) and not hook_context.models:
        return  # sharded by other means
    if not hook_context.ownership.claim(what, now=now):
        return
    for check in hook_context.complete.values():
        check()
    scripts = hook_context.ownership.only_replicas  # it keeps equal what it gives to no one
    roots, bare = ([], new) if scripts else hook_context.module_registry.roots_of(new)
    for root in roots:
        adopt_model(root, hook_context, what=what)
    if bare and not scripts:
        _keep_unsharded(bare, what)
    repoint(optimizer, known_parameters() | {id(param): "" for param in bare})
    _step_over_mixtures(optimizer)
    if optimizer not in hook_context.optimizers and _trains_shards(optimizer):
        hook_context.optimizers.add(optimizer)
        average_closure(optimizer, hook_context)


def _keep_unsharded(bare: list[Any], what: str) -> None:
    """Keep parameters of no module equal on all workers: rank 0's values, gradients averaged."""
    check_not_gathered(bare, what=what)
    mesh = shard_target(ambient_plugin().settings(), mesh=None, process_group=None, device=None).mesh
    fresh = [param for param in bare if not hasattr(param, "fsdplaunch_unsharded")]
    check_no_gradients("a parameter of no module", fresh, what=what)
    for param in fresh:
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            torch.distributed.broadcast(param.data, src=torch.distributed.get_global_rank(group, 0), group=group)
        param.fsdplaunch_unsharded = True
    if fresh:
        ReplicatedParams(fresh, mesh)
        count = sum(param.numel() for param in fresh)
        messages.say(
            f"{script_line()}: {count} parameters of no module stay unsharded, their gradients are averaged"
        )


def _trains_shards(optimizer: Optimizer) -> bool:
    return any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])


def _step_over_mixtures(optimizer: Optimizer) -> None:
    """Let an optimizer step over shards and plain tensors: torch's loops over many at once take no mixture."""
    for settings in optimizer.param_groups:
        kinds = {isinstance(param, DTensor) for param in settings["params"]}
        if len(kinds) > 1 and "foreach" in settings and not settings.get("fused"):
            settings["foreach"] = False
