"""Shard one model with `fully_shard`: every parameter becomes a DTensor split along its first dimension.

What the script put on parameters stays when the model is moved or cast.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection.parameters import parameters_of
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.patch import wrap
from fsdplaunch.runtime.sharding.checks import naming
from fsdplaunch.runtime.sharding.gradients import place_gradients
from fsdplaunch.runtime.sharding.ignored import IgnoredParts
from fsdplaunch.runtime.sharding.materialize import Materializer
from fsdplaunch.runtime.sharding.mesh import data_mesh
from fsdplaunch.runtime.sharding.optimizers import keep_parameter_attributes
from fsdplaunch.runtime.sharding.settings import Settings, fsdp2_policy, offloads
from fsdplaunch.runtime.sharding.wrap import Units, class_name
from fsdplaunch.runtime.torch_internals.fsdp import (
    allow_class,
    gather_for_any_output,
    gathered_parameters,
)
from fsdplaunch.runtime.torch_internals.modules import MOVE_METHOD


def shard(
    model: nn.Module,
    units: Units,
    *,
    settings: Settings,
    mesh: DeviceMesh,
    materializer: Materializer,
    out: IgnoredParts,
    device: torch.device,  # noqa: ARG001  (the mesh has it)
) -> nn.Module:
    """Shard the units bottom-up and the model last, in place, and return the model.

    Each unit gets its storage and rank 0's values just before it is sharded, so no rank ever holds more of the
    full model on its device than one unit.
    """
    common = _common(settings, mesh, out)
    policy = _precision(settings, output=None)
    for name, unit in reversed(units.items()):
        materializer.materialize(unit)
        with naming(name):
            allow_class(type(unit))
            fully_shard(unit, **common, mp_policy=policy, reshard_after_forward=settings.reshard_after_forward)
    materializer.materialize(model)
    # The root is needed again as soon as backward begins; torch's own default is to keep it gathered, too.
    reshard = False if units else settings.reshard_after_forward
    root_policy = _precision(settings, output=settings.dtypes.output)
    with naming(type(model).__name__):
        allow_class(type(model))
        fully_shard(model, **common, mp_policy=root_policy, reshard_after_forward=reshard)
    if settings.forward_prefetch:
        _prefetch_forward([unit for unit in (model, *units.values()) if isinstance(unit, FSDPModule)])
    place_gradients(model)
    keep_attributes_through_moves(model)
    for unit in (model, *units.values()):
        if isinstance(unit, FSDPModule):
            gather_for_any_output(unit)
    return model


def _common(settings: Settings, mesh: DeviceMesh, out: IgnoredParts) -> dict[str, Any]:
    """Return the arguments that all calls share."""
    common: dict[str, Any] = {"mesh": data_mesh(mesh), "offload_policy": _offload(settings, mesh)}
    params = set(out.parameters())
    return common | ({"ignored_params": params} if params else {})


def _offload(settings: Settings, mesh: DeviceMesh) -> OffloadPolicy:
    pin = torch.cuda.is_available()
    return CPUOffloadPolicy(pin_memory=pin) if offloads(settings, mesh.device_type) else OffloadPolicy()


def _precision(settings: Settings, *, output: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the dtypes of one unit.

    The output dtype belongs to the root alone: blocks that returned it would feed the next block a dtype its
    weights do not have.
    """
    return fsdp2_policy(replace(settings.dtypes, output=output))


def _prefetch_forward(units: list[FSDPModule]) -> None:
    """Have each unit, the root first, gather the next one while it computes itself."""
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])


_units: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Those of models that this package has sharded."""
_refusing: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Units that were moved or cast after they had computed."""


def keep_attributes_through_moves(model: nn.Module) -> None:
    """Keep them for a model that `fully_shard` has just sharded."""
    _units.update(module for module in model.modules() if isinstance(module, FSDPModule))
    _watch_moves()


@functools.cache
def _watch_moves() -> None:
    wrap(FSDPModule, MOVE_METHOD, _move)


def _move(move: Any, unit: Any, *args: Any, **kwargs: Any) -> Any:
    if unit not in _units:
        return move(unit, *args, **kwargs)
    unit.reshard()
    before = [param.dtype for param in parameters_of(unit)]
    with keep_parameter_attributes(unit), _moving_gradients(unit, args[0] if args else kwargs["fn"]):
        result = move(unit, *args, **kwargs)
    place_gradients(unit)
    if gathered_parameters(unit) and unit not in _refusing:
        _refusing.add(unit)
        unit.register_forward_pre_hook(_refusing_passes(before, script_line()), prepend=True)
    return result


@contextmanager
def _moving_gradients(model: nn.Module, move: Callable[[Any], Any]) -> Iterator[None]:
    """Move the gradients of shards beside them: torch cannot exchange underneath what a backward has set."""
    gradients = [(p, p.grad) for p in parameters_of(model) if isinstance(p, DTensor) and p.grad is not None]
    for param, _ in gradients:
        param.grad = None
    yield
    with torch.no_grad():
        for param, gradient in gradients:
            param.grad = move(gradient)


def _refusing_passes(dtypes: list[torch.dtype], line: str) -> Callable[..., None]:
    """Return a hook that refuses to compute in other dtypes than at first: torch would gather in those."""

    def refuse(module: nn.Module, _inputs: Any) -> None:
        if [param.dtype for param in parameters_of(module)] != dtypes:
            msg = f"{line} changed the dtype of {class_name(module)} after its first pass, which fixed it"
            raise ShardingError(msg, hint="change it before that, or use mixed_precision or torch.autocast")

    return refuse
