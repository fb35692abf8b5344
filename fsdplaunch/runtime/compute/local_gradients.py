"""Passes whose gradients are only added up on each rank, until one averages them, as inside of `no_sync`.

FSDP2 keeps what they add up beside the gradients of the shards. So `zero_grad` clears it as well, and a step or a
clip averages what no pass has averaged.
"""

import functools
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.api.gradients import set_gradient_sync
from fsdplaunch.runtime.inspection.parameter_names import parameters_of
from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import (
    drop_local_gradients,
    group_refs,
    take_local_gradients,
)

_groups: "weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Any]]]" = weakref.WeakKeyDictionary()
"""The units' groups of models that have ever made a pass that averages nothing."""
_apart: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models whose next pass averages nothing."""
_told: list[bool] = []
_until_the_end = ExitStack()


def average_gradients(model: nn.Module, *, on: bool) -> None:
    """Have the next passes of a sharded model average their gradients, or only add them up."""
    _watch_optimizers()
    if model not in _groups:
        _groups[model] = [ref for unit in model.modules() if is_unit(unit) for ref in group_refs(unit)]
    (_apart.discard if on else _apart.add)(model)
    set_gradient_sync(model, on=on)


@functools.cache
def _watch_optimizers() -> None:
    def clearing(original: Any) -> Any:
        @functools.wraps(original)
        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            original(self, set_to_none)
            shards = {
                id(each) for each in (_params_of(self) if isinstance(self, Optimizer) else parameters_of(self))
            }
            for ref in [ref for refs in _groups.values() for ref in refs]:
                drop_local_gradients(ref, shards)

        return zero_grad

    _until_the_end.enter_context(replaced(Optimizer, "zero_grad", clearing))
    _until_the_end.enter_context(replaced(nn.Module, "zero_grad", clearing))
    register_optimizer_step_pre_hook(lambda optimizer, *_: average_local_gradients(_params_of(optimizer)))


def _params_of(optimizer: Optimizer) -> Iterable[Any]:
    return (param for group in optimizer.param_groups for param in group["params"])


@torch.no_grad()
def average_local_gradients(params: Iterable[Any]) -> None:
    """Average what was added up for shards and no pass has averaged. Collective.

    Torch's DistributedDataParallel would let each rank step with its own, so that they train apart from there on.
    """
    shards = {id(param) for param in params} if _groups else set()
    refs = [ref for refs in _groups.values() for ref in refs]
    pending = [found for ref in refs for found in take_local_gradients(ref, shards)]
    for shard, gradient in pending:
        averaged = _averaged(gradient, shard)
        shard.grad = averaged if shard.grad is None else shard.grad + averaged
    if pending and not _told:
        _told.append(True)
        messages.say(
            f"{script_line()}: no pass outside of no_sync() has averaged these gradients: they are averaged"
            " here, where each rank would step with its own under DistributedDataParallel"
        )


def _averaged(gradient: torch.Tensor, shard: Any) -> Any:
    """Return the shard of the mean of all ranks' full gradients."""
    mesh = shard.device_mesh
    summed: Any = DTensor.from_local(gradient.to(shard.dtype), mesh, [Partial()] * mesh.ndim, run_check=False)
    return summed.redistribute(placements=shard.placements) / mesh.size()


def missing_gradients_note(error: str) -> str | None:
    """Return what to say of the error of a script that looks for gradients which were only added up."""
    if not _apart or not ("NoneType" in error or "non-empty TensorList" in error):
        return None
    return (
        "fsdplaunch: the last pass was inside of no_sync(), whose gradients are no parameter's .grad until they"
        " are averaged.\nTake the pass out of no_sync() to have them; weights that ranks change by gradients of"
        " their own (SAM) cannot be sharded"
    )
