"""What optimizers need of shards: gradients of their parameters' kind, full norms, the loss of all ranks.

The rest of a step is like other code of a script: torch's own steps on local shards (`sharding.local_steps`), and
one that looks at full tensors, as LBFGS, Adafactor, Muon or a script's own do, gets them (`torch_function`).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdplaunch.runtime.api import gradients
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.who_shards import Ownership
from fsdplaunch.runtime.auto.shards.values import full_value, placed_like
from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.compute.local_gradients import average_local_gradients
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.dtensor import placements_of
from fsdplaunch.runtime.torch_internals.modules import TOTAL_NORM


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
