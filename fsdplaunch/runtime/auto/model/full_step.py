"""Let optimizers step that look at full tensors: LBFGS, which flattens all of them, and those that factor them.

Needed because they compute with the full gradient of a parameter, or of all, by operations that shards do not have
or that are something else for each shard.
"""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer

from fsdplaunch.config.environment import decode
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.losses.whole_value import is_whole
from fsdplaunch.runtime.inspection.accessors import full_tensor
from fsdplaunch.runtime.rank import configured_data_ranks
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.state_dict.optim_state_dict import cut_to_shard
from fsdplaunch.runtime.torch_internals.modules import LBFGS_ADDS, LBFGS_GATHERS

_FACTORING = frozenset({"Adafactor", "Shampoo", "DistributedShampoo", "SOAP", "CAME", "SM3"})
"""Classes, of torch and of others, whose step needs each parameter in full."""
_MUON: Any = getattr(torch.optim, "Muon", ())
"""Torch's, from 2.9 on: it multiplies in bf16, where products of shards are rounded before they are added."""


def step_on_full_tensors(optimizer: Optimizer, loss_is_sum: Callable[[], bool]) -> None:
    """Let an optimizer that needs full tensors have them, and print what that costs.

    What stands for `step` is a method, for schedulers look behind it.

    Args:
        optimizer: Just built, with shards in its groups.
        loss_is_sum: Tells whether the last loss was a sum over the batch.
    """
    name = type(optimizer).__name__
    own: dict[str, Any] = optimizer.__dict__
    step: Any = optimizer.step
    if isinstance(optimizer, torch.optim.LBFGS):
        own[LBFGS_GATHERS] = lambda: _flat_gradient(_params(optimizer))
        own[LBFGS_ADDS] = lambda size, update: _add_flat(_params(optimizer), size, update)
        own["step"] = MethodType(lambda _, closure: step(_averaged(closure, loss_is_sum)), optimizer)
        messages.say(f"{script_line()}: {name} keeps full gradients on every rank")
    elif name in _FACTORING or isinstance(optimizer, _MUON):
        own["step"] = MethodType(lambda _, closure=None: _step_one_by_one(optimizer, step, closure), optimizer)
        messages.say(f"{script_line()}: {name} needs full tensors: each parameter is gathered for its step")
    elif not type(optimizer).__module__.startswith("torch."):
        own["step"] = MethodType(lambda _, *closure: _step_with_plain_state(step, closure), optimizer)


def _step_with_plain_state(step: Any, closure: tuple[Any, ...]) -> Any:
    """Step with an optimizer of the script's own; its state may be plain tensors, which all ranks have alike."""
    if closure:
        return step(*closure)  # the model's passes are none of this
    with implicit_replication():
        return step()


def _params(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _flat_gradient(params: Sequence[Any]) -> torch.Tensor:
    """Return the full gradients of all parameters in one row. Collective."""
    rows = []
    for param in params:
        gradient = torch.zeros_like(param) if param.grad is None else param.grad
        rows.append(full_tensor(gradient.detach()).reshape(-1))
    return torch.cat(rows)


def _add_flat(params: Sequence[Any], size: float, update: torch.Tensor) -> None:
    """Add to all parameters their part of a row, times a size."""
    for param, part in zip(params, update.split([param.numel() for param in params]), strict=True):
        param.add_(cut_to_shard(part.view(param.shape), param), alpha=size)


def _averaged(closure: Callable[[], Any], loss_is_sum: Callable[[], bool]) -> Callable[[], Any]:
    """Return a closure whose loss is that of all ranks: what is decided by it must be the same on all."""

    def compute() -> torch.Tensor:
        own = torch.as_tensor(closure())
        if is_whole(own):
            return own.detach().clone()
        loss = own.detach().clone()
        dist.all_reduce(loss)
        ranks = dist.get_world_size()
        readers = configured_data_ranks(decode(), rank=0, size=ranks).size
        return loss * (readers if loss_is_sum() else 1) / ranks

    return compute


def _step_one_by_one(optimizer: Optimizer, step: Any, closure: Callable[[], Any] | None) -> Any:
    """Step with one full parameter after another, so that only one is gathered at a time. Collective."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    groups = optimizer.param_groups
    try:
        for group in groups:
            for param in group["params"]:
                if param.grad is not None:
                    _step_one(optimizer, step, group, param)
    finally:
        optimizer.param_groups = groups
    return loss


@torch.no_grad()
def _step_one(optimizer: Optimizer, step: Any, group: dict[str, Any], param: Any) -> None:
    full = nn.Parameter(full_tensor(param.detach()), requires_grad=True)
    full.grad = full_tensor(param.grad)
    state = optimizer.state.pop(param, None)
    if state:
        optimizer.state[full] = {name: full_tensor(value) for name, value in state.items()}
    optimizer.param_groups = [{**group, "params": [full]}]
    step()
    param.copy_(cut_to_shard(full.detach(), param))
    stepped = optimizer.state.pop(full, {})
    optimizer.state[param] = {name: cut_to_shard(value, param) for name, value in stepped.items()}
