"""Shard one model with `fully_shard`: every parameter becomes a DTensor split along its first dimension.

What the script put on parameters stays when the model is moved or cast.
"""

import functools
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection import parameters_of
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
from fsdplaunch.runtime.torch_internals.fsdp import allow_class, gather_for_any_output, gathered_parameters
from fsdplaunch.runtime.torch_internals.modules import MOVE_METHOD


def shard(
    model: nn.Module,
    units: Units,
    *,
    settings: Settings,
    mesh: DeviceMesh,
    materializer: Materializer,
    out: IgnoredParts,
) -> nn.Module:
    """Shard the units bottom-up and the model last, in place, and return the model.

    Each unit gets its storage and rank 0's values just before it is sharded, so no rank ever holds more of the
    full model on its device than one unit.
    """
    params = set(out.parameters())
    offload = (
        CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offloads(settings, mesh.device_type) else None
    )
    common: dict[str, Any] = {"mesh": data_mesh(mesh), "offload_policy": offload or OffloadPolicy()}
    common |= {"ignored_params": params} if params else {}
    # The output dtype is the root's alone: blocks would feed the next one a dtype that its weights do not have.
    policy = fsdp2_policy(replace(settings.dtypes, output=None))
    for name, unit in reversed(units.items()):
        materializer.materialize(unit)
        with naming(name):
            allow_class(type(unit))
            fully_shard(unit, **common, mp_policy=policy, reshard_after_forward=settings.reshard_after_forward)
    materializer.materialize(model)
    # The root is needed again as soon as backward begins; torch's own default is to keep it gathered, too.
    reshard = False if units else settings.reshard_after_forward
    with naming(type(model).__name__):
        allow_class(type(model))
        fully_shard(model, **common, mp_policy=fsdp2_policy(settings.dtypes), reshard_after_forward=reshard)
    sharded = [unit for unit in (model, *units.values()) if isinstance(unit, FSDPModule)]
    if settings.forward_prefetch:
        for before, following in pairwise(sharded):
            before.set_modules_to_forward_prefetch([following])
    place_gradients(model)
    _units.update(module for module in model.modules() if isinstance(module, FSDPModule))
    _watch_moves()
    for unit in sharded:
        gather_for_any_output(unit)
    return model


_units: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # those of models that this package has sharded
_refusing: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Units that were moved or cast after they had computed."""


@functools.cache
def _watch_moves() -> None:
    wrap(FSDPModule, MOVE_METHOD, _move)


def _move(move: Any, unit: Any, *args: Any, **kwargs: Any) -> Any:
    """Move or cast a unit with the attributes of its parameters, and with their gradients beside them.

    Torch cannot exchange underneath what a backward has set. After the first pass it would gather in the dtypes of
    then, so that a pass in others is refused.
    """
    if unit not in _units:
        return move(unit, *args, **kwargs)
    unit.reshard()
    dtypes = [param.dtype for param in parameters_of(unit)]
    gradients = [(p, p.grad) for p in parameters_of(unit) if isinstance(p, DTensor) and p.grad is not None]
    with keep_parameter_attributes(unit):
        for param, _ in gradients:
            param.grad = None
        result = move(unit, *args, **kwargs)
        with torch.no_grad():
            for param, gradient in gradients:
                param.grad = (args[0] if args else kwargs["fn"])(gradient)
    place_gradients(unit)
    if gathered_parameters(unit) and unit not in _refusing:
        line = script_line()

        def refuse(module: nn.Module, _inputs: Any) -> None:
            if [param.dtype for param in parameters_of(module)] != dtypes:
                msg = f"{line} changed the dtype of {class_name(module)} after its first pass, which fixed it"
                raise ShardingError(msg, hint="change it before that, or use mixed_precision or torch.autocast")

        _refusing.add(unit)
        unit.register_forward_pre_hook(refuse, prepend=True)
    return result
