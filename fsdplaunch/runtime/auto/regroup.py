"""Optimizers train the shards: their models are sharded when they are built, and their groups changed over.

Done right after the optimizer's base class has its groups and before the subclass goes on, so that what a subclass
keeps for itself is the shards already. Parameters without a module stay whole and equal on all workers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdplaunch.runtime import report
from fsdplaunch.runtime.auto.adopt import adopt
from fsdplaunch.runtime.auto.job import Job
from fsdplaunch.runtime.auto.ownership import script_line
from fsdplaunch.runtime.auto.patching import replaced
from fsdplaunch.runtime.auto.visits import give_back
from fsdplaunch.runtime.optimizer import repoint
from fsdplaunch.runtime.plugin import ambient_plugin
from fsdplaunch.runtime.prepared import known_parameters
from fsdplaunch.runtime.replicated import Replicas
from fsdplaunch.runtime.shard import place_for


@contextmanager
def training_shards(job: Job) -> Iterator[None]:
    """Shard what an optimizer is built on, or given later, and let it train the shards."""
    building: set[int] = set()

    def build(original: Any) -> Any:
        def __init__(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:  # noqa: N807
            for model in list(job.models):
                give_back(model)  # parameters that are read now must be the shards
            building.add(id(self))
            try:
                original(self, params, defaults)
            finally:
                building.discard(id(self))
            _regroup(self, job)

        return __init__

    def extend(original: Any) -> Any:
        def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
            original(self, param_group)
            if id(self) not in building:
                _regroup(self, job)

        return add_param_group

    with replaced(Optimizer, "__init__", build), replaced(Optimizer, "add_param_group", extend):
        yield


def _regroup(optimizer: Optimizer, job: Job) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    known = known_parameters()
    new = [p for p in params if id(p) not in known and not hasattr(p, "fsdplaunch_origin")]
    what = f"builds {type(optimizer).__name__}"
    if all(isinstance(p, DTensor) for p in params) and not job.models:
        return  # sharded by other means
    if not job.ownership.claim(what):
        return
    for check in job.complete.values():
        check()
    roots, bare = job.births.roots_of(new)
    for root in roots:
        adopt(root, job, what=what)
    if bare:
        _keep_whole(bare, optimizer)
    repoint(optimizer, known_parameters() | {id(param): "" for param in bare})


def _keep_whole(bare: list[Any], optimizer: Optimizer) -> None:
    """Keep parameters of no module equal on all workers: rank 0's values, gradients averaged."""
    mesh = place_for(ambient_plugin().settings(), mesh=None, process_group=None, device=None).mesh
    fresh = [param for param in bare if not hasattr(param, "fsdplaunch_whole")]
    for param in fresh:
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            torch.distributed.broadcast(param.data, src=torch.distributed.get_global_rank(group, 0), group=group)
        param.fsdplaunch_whole = True
    if fresh:
        Replicas(fresh, mesh)
        count = sum(param.numel() for param in fresh)
        report.say(f"{script_line()}: {count} parameters of no module stay whole, their gradients are averaged")
    for settings in optimizer.param_groups:  # torch's loops over many tensors at once take no mixture
        kinds = {isinstance(param, DTensor) for param in settings["params"]}
        if len(kinds) > 1 and "foreach" in settings and not settings.get("fused"):
            settings["foreach"] = False
