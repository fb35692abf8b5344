"""Calls of torch that are given shards: optimizer steps, clipping, functional calls, collectives. Rule 3.

Torch's own optimizers step on local shards (`sharding.optimizers`), and one that looks at full tensors, as LBFGS,
Adafactor, Muon or a script's own do, gets them (`torch_function`).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import utils
from torch.nn.utils import clip_grad, stateless
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.api import gradients
from fsdplaunch.runtime.api.gradients import average_local_gradients
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.full_values import full_value, gathered, placed_like
from fsdplaunch.runtime.auto.model.who_shards import Ownership
from fsdplaunch.runtime.inspection.units import is_unit, reshard
from fsdplaunch.runtime.messages import calling_lines, script_line
from fsdplaunch.runtime.patch import once_imported, replaced
from fsdplaunch.runtime.state_dict.deepcopy import as_before
from fsdplaunch.runtime.torch_internals.distributed import local_tensor, operator_handlers, placements_of
from fsdplaunch.runtime.torch_internals.fsdp import root_mixed_precision
from fsdplaunch.runtime.torch_internals.modules import TOTAL_NORM
from fsdplaunch.runtime.torch_internals.tensors import exchanges, is_in_transform


@contextmanager
def stepping_shards(hook_context: HookContext) -> Iterator[None]:
    """Place gradients before steps, and clip shards by the norm of the full gradient."""

    def place(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if hook_context.ownership.ours:
            _place_gradients(optimizer)

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(place).remove)
        for owner in (utils, clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                stack.enter_context(
                    replaced(owner, name, functools.partial(_averaged_first, hook_context.ownership))
                )
        clip_norm = utils.clip_grad_norm_
        once_imported("torch_xla", lambda _: setattr(utils, "clip_grad_norm_", clip_norm))  # it puts its own there
        for owner, name in ((clip_grad, TOTAL_NORM), (utils, "get_total_norm")):
            stack.enter_context(replaced(owner, name, functools.partial(_norm_of_full, hook_context.ownership)))
        yield


def _averaged_first(ownership: Ownership, original: Any) -> Any:
    """Make a function that clips what passes without communication have added up, as all ranks' mean."""

    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        params = gradients.listed(parameters)
        if ownership.ours:
            average_local_gradients(params)
        return original(params, *args, **kwargs)

    return clip


def _norm_of_full(ownership: Ownership, original: Any) -> Any:
    """Make a function that finds one norm over shards and plain tensors together, by one exchange."""

    @functools.wraps(original)
    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None
    ) -> Any:
        given = gradients.listed(tensors)
        if not ownership.ours or not any(isinstance(each, DTensor) for each in given):
            return original(given, norm_type, error_if_nonfinite, foreach)
        norm = gradients.total_norm(given, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            msg = f"The total norm of order {norm_type} for gradients from `parameters` is non-finite"
            raise RuntimeError(msg)
        return norm

    return total_norm


def _place_gradients(optimizer: Optimizer) -> None:
    """Give each parameter a gradient of its own kind, where the script has set one of another.

    Plain parameters are copies of the weights that the script steps in their place, in higher precision
    (`master.grad = p.grad.float()`).
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            gradient = param.grad
            if gradient is None:
                continue
            if not isinstance(param, DTensor):
                if isinstance(gradient, DTensor):
                    param.grad = full_value(gradient, call="the gradient of a parameter")
            elif not isinstance(gradient, DTensor) or placements_of(gradient) != placements_of(param):
                param.grad = placed_like(param, gradient)


def average_closure(optimizer: Optimizer, hook_context: HookContext) -> None:
    """Let an optimizer that decides by its closure's loss have that of all ranks, which each has of its own rows.

    What stands for `step` is a method: schedulers look behind it.
    """
    if not isinstance(optimizer, torch.optim.LBFGS) or hook_context.keeps_batch:
        return
    step: Any = optimizer.step
    optimizer.__dict__["step"] = MethodType(lambda _, closure: step(_averaged(closure)), optimizer)


def _averaged(closure: Callable[[], Any]) -> Callable[[], torch.Tensor]:
    def compute() -> torch.Tensor:
        loss = torch.as_tensor(closure()).detach().clone()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    return compute


_TRANSFORM_HINT = "run this script in one process: --num-processes 1 --shard off"


@contextmanager
def computing_with_given_tensors(hook_context: HookContext) -> Iterator[None]:
    """Rule 3: what calls a module with other parameters than its own computes with these."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def functional_call(module: nn.Module, given: Any, *args: Any, **kwargs: Any) -> Any:
            if hook_context.ownership.ours and not torch.compiler.is_compiling():
                merged = given if isinstance(given, Mapping) else {k: v for one in given for k, v in one.items()}
                if _replaces(module, merged):
                    return _call_unsharded(original, module, merged, args, kwargs)
            return original(module, given, *args, **kwargs)

        return functional_call

    with replaced(torch.func, "functional_call", make), replaced(stateless, "functional_call", make):
        yield


def _replaces(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Return whether a module has shards, and any of what is given is something else than its own parameter."""
    reshard(module)
    own = dict(module.named_parameters(remove_duplicate=False))
    shards = any(isinstance(param, DTensor) for param in own.values())
    return shards and any(value is not own[name] for name, value in given.items() if name in own)


def _call_unsharded(original: Any, module: nn.Module, given: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
    """Call a module without the hooks of sharding, with full parameters that have gradients. Collective.

    Raises:
        ShardingError: A transform of torch.func differentiates by what is given.
    """
    if is_in_transform():
        msg = f"{calling_lines()}: torch.func for the parameters of a sharded model would lose gradients"
        raise ShardingError(msg, hint=_TRANSFORM_HINT)
    units = (part for part in module.modules() if is_unit(part))
    dtype = next((root_mixed_precision(unit).param_dtype for unit in units), None)
    own = dict(module.named_parameters(remove_duplicate=False))
    tensors = {**own, **given}
    full = {id(tensors[name]): _full(tensors[name], dtype) for name in own}
    with ExitStack() as stack:
        for part in list(module.modules()):
            stack.enter_context(as_before(part))
        return original(module, {**tensors, **{name: full[id(tensors[name])] for name in own}}, *args, **kwargs)


def _full(param: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    full = gathered(param, keeps_batch=False) if isinstance(param, DTensor) else param
    return full.to(dtype) if dtype is not None and full.is_floating_point() else full


_COLLECTIVES = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "gather_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "scatter_", "alltoall_"),
)
"""The operators by which torch.distributed exchanges tensors."""
_EXCHANGE_HINT = (
    "leave the exchange out: what is given to DistributedDataParallel has the same parameters and gradients on all"
    " ranks; or launch with --hide-ranks, if the script then trains in one process, or with --shard off"
)


@contextmanager
def refusing_collectives(hook_context: HookContext) -> Iterator[None]:
    """Refuse collectives that a script calls with shards of models that were sharded for it."""

    def refuse(op: Any, args: Any, kwargs: Any) -> Any:
        if not hook_context.ownership.ours or torch.compiler.is_compiling():
            return op(*args, **kwargs)
        raise _refusal()

    def broadcast(op: Any, args: Any, kwargs: Any) -> Any:
        tensors, *rest = args
        if not hook_context.ownership.ours:
            return op(*args, **kwargs)
        nothing = [local_tensor(each).new_empty(0) for each in tensors if isinstance(each, DTensor)]
        return tensors, op(nothing, *rest, **kwargs)[1]

    table, packets = operator_handlers(), [getattr(torch.ops.c10d, name) for name in _COLLECTIVES]
    before = dict(table)
    table.update({getattr(packet, each): refuse for packet in packets for each in packet.overloads()})
    table[torch.ops.c10d.broadcast_.default] = broadcast
    try:
        yield
    finally:
        table.clear()
        table.update(before)


def refuse_functional(func: Any) -> None:
    """Refuse a functional collective that a script calls with shards.

    Raises:
        ShardingError: The function is one.
    """
    if exchanges(func):
        raise _refusal()


def _refusal() -> ShardingError:
    msg = f"{script_line()} exchanges parameters or gradients of a sharded model: they are averaged already"
    return ShardingError(msg, hint=_EXCHANGE_HINT)
