"""Shard one model: the fixed order of work between the user's model and the sharded one."""

import os
import re
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import fsdp1, fsdp2, report
from fsdplaunch.runtime.blocks import class_name
from fsdplaunch.runtime.checkpointing import checkpoint_blocks
from fsdplaunch.runtime.checks import check_model, check_whole
from fsdplaunch.runtime.loading.pretrained import Pretrained
from fsdplaunch.runtime.mesh import SHARD, make_mesh
from fsdplaunch.runtime.names import clean_name, count, tied_names
from fsdplaunch.runtime.optimizer import note_origins
from fsdplaunch.runtime.plugin import FullyShardedDataParallelPlugin
from fsdplaunch.runtime.prepared import Prepared, remember
from fsdplaunch.runtime.replicated import keep_equal
from fsdplaunch.runtime.settings import Settings
from fsdplaunch.runtime.watch import mark_sharded
from fsdplaunch.runtime.weights import Aligner
from fsdplaunch.runtime.wrap import plan_units


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a model goes: this worker's device, and the layout of all ranks."""

    mesh: DeviceMesh
    device: torch.device


def place_for(
    settings: Settings,
    *,
    mesh: DeviceMesh | None,
    process_group: dist.ProcessGroup | None,
    device: torch.device | str | None,
) -> Place:
    """Decide device and mesh, joining the process group first if the script was started by torchrun alone.

    Raises:
        ShardingError: There is no process group and nothing to make one from.
    """
    if not dist.is_initialized():
        _join()
    target = torch.device(device) if device is not None else _own_device(mesh)
    if mesh is None and process_group is not None:
        mesh = DeviceMesh.from_group(process_group, target.type, mesh_dim_names=(SHARD,))
    return Place(mesh=mesh or make_mesh(settings, target), device=target)


def _join() -> None:
    if "RANK" not in os.environ:
        msg = "there are no workers to shard over: this process was started alone"
        raise ShardingError(msg, hint="start the script with `fsdplaunch launch`")
    from fsdplaunch.config.environment import decode
    from fsdplaunch.runtime.device import choose_device, join_group

    config = decode()
    join_group(config, choose_device(config))


def _own_device(mesh: DeviceMesh | None) -> torch.device:
    on_cpu = mesh.device_type == "cpu" if mesh is not None else not _group_has_cuda()
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def _group_has_cuda() -> bool:
    return torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())


def is_sharded(model: nn.Module) -> bool:
    """Whether a model is sharded already, by whomever."""
    return isinstance(model, FSDPModule | FullyShardedDataParallel)


def shard_model(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, place: Place, weights: Pretrained | None = None
) -> nn.Module:
    """Shard a model as the plugin says; see `prepare` for the order of work.

    Args:
        model: Not sharded yet.
        plugin: How.
        place: Where.
        weights: Files whose values it gets; None leaves it those it has.

    Returns:
        The model itself (version 2) or the wrapper around it (version 1).

    Raises:
        ShardingError: It cannot be done as asked.
    """
    settings = plugin.settings()
    check_model(model, settings.version)
    name = class_name(model)
    tied = tied_names(model)
    total = sum(param.numel() for param in model.parameters())
    ignored = _ignored(model, settings)
    units = plan_units(model, settings, ignored)
    aligner = _aligner(model, settings, place, ignored, weights)
    kinds = [class_name(unit) for unit in units.values()]
    home = note_origins({entry.name: entry.tensor for entry in aligner.entries})
    for module in ignored:  # first: settling may exchange parameters, and sharding is told which to leave out
        aligner.settle(module)
    if settings.activation_checkpointing:
        units = checkpoint_blocks(model, units, settings, place.device)
    shard = fsdp1.shard if settings.version == 1 else fsdp2.shard
    sharded = shard(model, units, settings=settings, mesh=place.mesh, aligner=aligner, ignored=ignored)
    aligner.fill(sharded)
    home.model = weakref.ref(sharded)
    prepared = Prepared(
        plugin=plugin,
        settings=settings,
        mesh=place.mesh,
        tied=tied,
        units=tuple(units),
        replicas=keep_equal(ignored, place.mesh),
    )
    check_whole(sharded, prepared, total=total, ignored=ignored, device=place.device)
    remember(sharded, prepared)
    mark_sharded("prepare")
    report.say(report.describe(sharded, prepared, name=name, kinds=kinds, total=count(total)))
    return sharded


def _aligner(
    model: nn.Module, settings: Settings, place: Place, ignored: list[nn.Module], weights: Pretrained | None
) -> Aligner:
    """What settles the model's tensors: with rank 0's values, or so that files fill them later."""
    arguments: dict[str, Any] = {
        "mesh": place.mesh,
        "device": place.device,
        "master": settings.dtypes.master,
        "frozen_too": settings.version == 1,  # a flat parameter has one format
        "ignored": ignored,
        "init_fn": settings.param_init_fn,
        "send": settings.sync_module_states or settings.ram_efficient,
    }
    if weights is None:
        return Aligner(model, **arguments)
    from fsdplaunch.runtime.loading.skeleton import Skeleton

    return Skeleton(model, where=weights.where, strict=weights.strict, settings=settings, **arguments)


def _ignored(model: nn.Module, settings: Settings) -> list[nn.Module]:
    """The modules not to shard: those given, or those whose whole name the expression matches."""
    if settings.ignored is None:
        return []
    if not isinstance(settings.ignored, str):
        return list(settings.ignored)
    try:
        pattern = re.compile(settings.ignored)
    except re.error as error:
        msg = f"fsdp_ignored_modules is no regular expression: {error}"
        raise ShardingError(msg, hint=f"got {settings.ignored!r}") from None
    names = [name for name, _ in model.named_modules() if name]
    found = [module for name, module in model.named_modules() if name and pattern.fullmatch(clean_name(name))]
    if not found:
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")  # noqa: PLR2004
        msg = f"fsdp_ignored_modules {settings.ignored!r} matches no module of {type(model).__name__}"
        raise ShardingError(msg, hint=f"the expression must match a whole name; the first names are {shown}")
    return found
