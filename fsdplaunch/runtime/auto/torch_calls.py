"""Calls of torch that are given shards: optimizer steps, clipping, functional calls, collectives. Rule 3.

Torch's own optimizers step on local shards (`sharding.optimizers`), and one that looks at full tensors, as LBFGS,
Adafactor, Muon or a script's own do, gets them (`torch_function`).
"""

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import utils
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdplaunch.runtime.api import gradients
from fsdplaunch.runtime.api.gradients import average_local_gradients
from fsdplaunch.runtime.auto import HookContext
from fsdplaunch.runtime.auto.full_values import full_value, placed_like
from fsdplaunch.runtime.auto.model.parameters import (
    ShardReference,
    data_of_parameters,
    refuse_exchange,
    with_shards,
)
from fsdplaunch.runtime.auto.torch_function import ShardFunctions
from fsdplaunch.runtime.patch import once_imported, replaced
from fsdplaunch.runtime.torch_internals.distributed import (
    local_tensor,
    operator_handlers,
    placements_of,
    unscale_function,
)


def step_shards(hook_context: HookContext) -> None:
    """Place gradients before optimizers step."""

    def place(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if hook_context.ownership.ours:
            _place_gradients(optimizer)

    clip_norm = utils.clip_grad_norm_
    once_imported("torch_xla", lambda _: setattr(utils, "clip_grad_norm_", clip_norm))  # it puts its own there
    hook_context.undo.callback(register_optimizer_step_pre_hook(place).remove)


def clip(original: Any, hook_context: HookContext, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for a function that clips: what passes without communication have added up is averaged first."""
    params = gradients.listed(parameters)
    if hook_context.ownership.ours:
        average_local_gradients(params)
    return original(params, *args, **kwargs)


def total_norm(
    original: Any,
    hook_context: HookContext,
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: Any = None,
) -> Any:
    """Stand for a function that finds one norm, over shards and plain tensors together, by one exchange."""
    given = gradients.listed(tensors)
    if not hook_context.ownership.ours or not any(isinstance(each, DTensor) for each in given):
        return original(given, norm_type, error_if_nonfinite, foreach)
    norm = gradients.total_norm(given, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        msg = f"The total norm of order {norm_type} for gradients from `parameters` is non-finite"
        raise RuntimeError(msg)
    return norm


def _place_gradients(optimizer: Optimizer) -> None:
    """Give each parameter a gradient of its own kind, where the script has set one of another."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            gradient = param.grad
            if gradient is None:
                continue
            if not isinstance(param, DTensor):  # a copy of a weight in higher precision that the script steps
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

    def step_by_mean(_: Any, closure: Callable[[], Any]) -> Any:
        def mean() -> torch.Tensor:
            loss = torch.as_tensor(closure()).detach().clone()
            dist.all_reduce(loss)
            return loss / dist.get_world_size()

        return step(mean)

    optimizer.__dict__["step"] = MethodType(step_by_mean, optimizer)


_Tensor: Any = torch.Tensor
_COLLECTIVES = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "gather_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "scatter_", "alltoall_"),
)
"""The operators by which torch.distributed exchanges tensors."""


def refuse_collectives(hook_context: HookContext) -> None:
    """Refuse collectives that a script calls with shards of models that were sharded for it."""

    def refuse(op: Any, args: Any, kwargs: Any) -> Any:
        if not hook_context.ownership.ours or torch.compiler.is_compiling():
            return op(*args, **kwargs)
        raise refuse_exchange()

    def broadcast(op: Any, args: Any, kwargs: Any) -> Any:
        tensors, *rest = args
        if not hook_context.ownership.ours:
            return op(*args, **kwargs)
        nothing = [local_tensor(each).new_empty(0) for each in tensors if isinstance(each, DTensor)]
        return tensors, op(nothing, *rest, **kwargs)[1]

    table, packets = operator_handlers(), [getattr(torch.ops.c10d, name) for name in _COLLECTIVES]
    hook_context.undo.callback(table.update, dict(table))
    hook_context.undo.callback(table.clear)
    table.update({getattr(packet, each): refuse for packet in packets for each in packet.overloads()})
    table[torch.ops.c10d.broadcast_.default] = broadcast


_ASIDE = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device"),
    *("__hash__", "__len__", "__deepcopy__", "__reduce_ex__", "__setstate__", "requires_grad_", "detach_"),
    *("retain_grad", "backward", "register_hook", "register_post_accumulate_grad_hook", "data_ptr"),
    *("untyped_storage", "has_names", "record_stream", "is_set_to", "__dlpack_device__"),
)
"""Methods that need no values, beside `is_contiguous` and the like, and properties."""
_READ_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})  # properties that are views
_SET_GRADIENT = _Tensor.grad.__set__


def _value_free_functions() -> Iterator[Any]:
    for name, function in vars(torch).items():
        if name.startswith("is_") and name != "is_nonzero" and callable(function):
            yield function
    for owner in torch.Tensor.__mro__[:2]:  # itself and what C++ defines of it
        for name, attribute in vars(owner).items():
            if name in _READ_PROPERTIES:
                continue
            if hasattr(attribute, "__set__") and hasattr(attribute, "__get__"):
                yield attribute.__get__
                if name != "grad":
                    yield attribute.__set__
            elif name in _ASIDE or (name.startswith("is_") and name != "is_nonzero"):
                yield getattr(torch.Tensor, name)
    yield unscale_function()


def compute_with_shards(hook_context: HookContext) -> None:
    """Compute what torch's functions are given of shards, from when the first model is sharded for the script."""

    def begin() -> None:
        make: Any = classmethod(_torch_function(hook_context))
        hook_context.undo.enter_context(replaced(DTensor, "__torch_function__", lambda _: make))

    hook_context.when_sharded.append(begin)
    hook_context.undo.enter_context(replaced(nn.Parameter, "data", lambda _: data_of_parameters(hook_context)))


def _torch_function(hook_context: HookContext) -> Any:
    disabled, aside = torch.DisableTorchFunctionSubclass, frozenset(_value_free_functions())
    functions: list[Any] = []

    def __torch_function__(_cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: N807
        with disabled():
            if func in aside:
                return func(*args, **kwargs) if kwargs else func(*args)
            if func == _SET_GRADIENT:
                param, gradient = args
                fits = type(gradient) is DTensor and gradient.placements == getattr(param, "placements", None)
                if gradient is None or fits or torch.compiler.is_compiling():
                    return func(*args)
            if not functions:
                functions.append(ShardFunctions(hook_context))
            if ShardReference in types:
                args, kwargs = with_shards(args), with_shards(kwargs)
            return functions[0](func, args, kwargs or {})

    return __torch_function__
