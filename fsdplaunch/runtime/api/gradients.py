"""Gradients of a sharded model: the norm over all ranks, clipping, and accumulation without communication.

FSDP2 keeps what passes without communication add up beside the gradients of the shards. So `zero_grad` clears it
as well, and a step or a clip averages what no pass has averaged.
"""

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection import parameters_of, unwrapped
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers, full_tensor, is_unit, local_tensor, outermost
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.patch import XLA_CLIP, XLA_NO_SYNC, call_if_imported, wrap
from fsdplaunch.runtime.sharding.mesh import split_groups
from fsdplaunch.runtime.sharding.registry import models_of, registered
from fsdplaunch.runtime.torch_internals.fsdp import group_refs, take_local_gradients

Parameters = nn.Module | Iterable[torch.Tensor] | torch.Tensor


def clip_grad_norm_(parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale gradients down to a largest norm, the norm being that of the full, unsharded gradient.

    Works on sharded and unsharded parameters together, and for both FSDP versions.

    Args:
        parameters: A model, or parameters.
        max_norm: The largest norm allowed.
        norm_type: The order of the norm; `inf` for the largest absolute value.

    Returns:
        The norm before clipping: a plain tensor without dimensions, equal on all ranks.

    Raises:
        ShardingError: Some parameters of an FSDP1 model were given, not all: their norm is not known by itself.
    """
    if isinstance(parameters, nn.Module):
        parameters = unwrapped(parameters)
    elif not isinstance(parameters, torch.Tensor):
        parameters = list(parameters)  # a generator can be read once only
    on_xla = call_if_imported(XLA_CLIP, parameters, max_norm, norm_type)
    if on_xla is not None:
        clipped: torch.Tensor = on_xla
        return clipped
    wrapped = _wrapper_of(parameters)
    if wrapped is not None:
        return wrapped.clip_grad_norm_(max_norm, norm_type)
    params = [param for param in listed(parameters) if param.grad is not None]
    norm = total_norm([param.grad for param in params if param.grad is not None], norm_type)
    for kind in _kinds(params):
        clip_grads_with_norm_(kind, max_norm, norm)
    return norm


def clip_grad_value_(parameters: Parameters, clip_value: float) -> None:
    """Limit every gradient element to `[-clip_value, clip_value]`; each rank limits its own shards."""
    for param in listed(parameters):
        if param.grad is not None:
            local_tensor(param.grad).clamp_(-clip_value, clip_value)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients on each rank without communication, for all but the last of several backward passes.

    Each rank then holds full gradients, so this needs the memory that sharding gradients saves.
    """
    with ExitStack() as stack:
        on_xla = call_if_imported(XLA_NO_SYNC, model)
        if on_xla is not None:
            stack.enter_context(on_xla)
        for root in outermost(model):
            if isinstance(root, FullyShardedDataParallel):
                stack.enter_context(root.no_sync())
        set_gradient_sync(model, on=False)
        stack.callback(set_gradient_sync, model, on=True)
        yield


def set_gradient_sync(model: nn.Module, *, on: bool) -> None:
    """Set whether backward passes of an FSDP2 model average gradients or only add them up on each rank."""
    for root in outermost(model):
        if is_unit(root):
            unit: Any = root
            unit.set_requires_gradient_sync(on)
    prepared = registered(model)
    if prepared is not None and prepared.replicas is not None:
        prepared.replicas.paused = not on


def listed(parameters: Parameters) -> list[torch.Tensor]:
    """Return the parameters that a model, one tensor or several stand for."""
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _wrapper_of(parameters: Parameters) -> FullyShardedDataParallel | None:
    """Return the FSDP1 model that was given, itself or as its parameters."""
    if isinstance(parameters, FullyShardedDataParallel):
        return parameters
    if isinstance(parameters, nn.Module) and fsdp1_wrappers(parameters):
        msg = f"only some of {type(parameters).__name__} is sharded by FSDP1, so its norm is not known"
        raise ShardingError(msg, hint="give clip_grad_norm_ the sharded model itself")
    given = {id(param) for param in listed(parameters)}
    for model in models_of(FullyShardedDataParallel):
        own = {id(param) for param in model.parameters()}
        if own == given and isinstance(model, FullyShardedDataParallel):
            return model
        if own & given:
            msg = "only some parameters of a model sharded by FSDP1 were given to clip_grad_norm_"
            raise ShardingError(msg, hint="give it the model")
    return None


def total_norm(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm over gradients of which some are split over ranks and some are not: a plain tensor.

    Torch refuses the mixture, and DTensors of different meshes, so each kind gets its own norm first.
    """
    norm_type = float(norm_type)
    norms = [_norm_of_kind(kind, norm_type) for kind in _kinds(gradients)]
    if not norms:
        return torch.tensor(0.0)
    stacked: torch.Tensor = torch.stack([norm.to(norms[0].device) for norm in norms])
    total: torch.Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return total


def _norm_of_kind(kind: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm over gradients of one kind, by one exchange for each axis of ranks that they are split over.

    Torch raises where a rank's shards are empty, and adds up over one axis only.
    """
    axes = split_groups(kind[0])
    if not axes:
        return full_tensor(get_total_norm(kind, norm_type))  # type: ignore[no-any-return]
    shards = [local_tensor(gradient) for gradient in kind]
    dtype = functools.reduce(torch.promote_types, (shard.dtype for shard in shards))  # the same on all ranks
    norm = get_total_norm([shard for shard in shards if shard.numel()], norm_type).to(shards[0].device, dtype)
    for group in axes:
        if norm_type == inf:
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=group)
            norm = norm ** (1 / norm_type)
    return norm


def _kinds(tensors: list[Any]) -> list[list[Any]]:
    """Return the tensors in groups: those split over the same axes of one mesh together, plain ones together."""
    kinds: dict[Any, list[Any]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        kinds.setdefault((mesh, tuple(map(id, split_groups(tensor)))), []).append(tensor)
    return list(kinds.values())


_groups: "weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Any]]]" = weakref.WeakKeyDictionary()
"""The units' groups of models that have ever made a pass that averages nothing."""
_apart: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # models whose next pass averages nothing
_told: list[bool] = []


def average_gradients(model: nn.Module, *, on: bool) -> None:
    """Have the next passes of a sharded model average their gradients, or only add them up."""
    _watch_optimizers()
    if model not in _groups:
        _groups[model] = [ref for unit in model.modules() if is_unit(unit) for ref in group_refs(unit)]
    (_apart.discard if on else _apart.add)(model)
    set_gradient_sync(model, on=on)


@functools.cache
def _watch_optimizers() -> None:
    wrap(Optimizer, "zero_grad", _clear_both)
    wrap(nn.Module, "zero_grad", _clear_both)
    register_optimizer_step_pre_hook(lambda optimizer, *_: average_local_gradients(_params_of(optimizer)))


def _clear_both(clear: Any, self: Any, set_to_none: bool = True) -> None:
    clear(self, set_to_none)
    _take(_params_of(self) if isinstance(self, Optimizer) else parameters_of(self))


def _params_of(optimizer: Optimizer) -> Iterable[Any]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _take(params: Iterable[Any]) -> list[tuple[Any, torch.Tensor]]:
    """Return what passes that average nothing have added up for shards, each with its shard, and forget it."""
    shards = {id(param) for param in params} if _groups else set()
    return [found for refs in _groups.values() for ref in refs for found in take_local_gradients(ref, shards)]


@torch.no_grad()
def average_local_gradients(params: Iterable[Any]) -> None:
    """Average what was added up for shards and no pass has averaged. Collective.

    Torch's DistributedDataParallel would let each rank step with its own, so that they train apart from there on.
    """
    pending = _take(params)
    for shard, gradient in pending:
        mesh, parts = shard.device_mesh, [Partial()] * shard.device_mesh.ndim
        summed: Any = DTensor.from_local(gradient.to(shard.dtype), mesh, parts, run_check=False)
        averaged = summed.redistribute(placements=shard.placements) / mesh.size()
        shard.grad = averaged if shard.grad is None else shard.grad + averaged
    if pending and not _told:
        _told.append(True)
        messages.say(
            f"{script_line()}: no pass outside of no_sync() has averaged these gradients: they are averaged"
            " here, where each rank would step with its own under DistributedDataParallel"
        )


def missing_gradients_note(error: str) -> str | None:
    """Return what to say of the error of a script that looks for gradients which were only added up."""
    if not _apart or not ("NoneType" in error or "non-empty TensorList" in error):
        return None
    return (
        "fsdplaunch: the last pass was inside of no_sync(), whose gradients are not in any parameter's .grad"
        " until they are averaged.\nTake the pass out of no_sync() to have them; weights that ranks change by"
        " gradients of their own (SAM) cannot be sharded"
    )
