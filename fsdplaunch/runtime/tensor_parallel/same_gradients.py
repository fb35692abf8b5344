"""Gradients of what ranks have alike must be alike: inside of split heads each rank has one of its own."""

import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import optimizer as optimizers

from fsdplaunch.errors import ShardingError
from fsdplaunch.name_lists import listed
from fsdplaunch.runtime.inspection.accessors import local_tensor
from fsdplaunch.runtime.inspection.parameter_names import named_parameters
from fsdplaunch.runtime.sharding.mesh import splits_layer
from fsdplaunch.runtime.step_hooks import before_first_step

_TOLERANCE = 1e-2


def check_first_gradients(model: nn.Module, axis: DeviceMesh, device: torch.device) -> None:
    """Compare, before the first optimizer step, the gradients of what the ranks of an axis do not split.

    Args:
        model: Sharded.
        axis: The ranks that split its layers.
        device: Where this worker computes.
    """
    held = weakref.ref(model)

    def compare() -> None:
        sharded = held()
        if sharded is not None:
            _compare(sharded, axis, device)

    before_first_step(optimizers, compare)


def _compare(model: nn.Module, axis: DeviceMesh, device: torch.device) -> None:
    alike = {
        name: param for name, param in named_parameters(model) if not splits_layer(param) and param.requires_grad
    }
    if not alike:
        return
    facts = torch.tensor([_facts(param) for param in alike.values()], dtype=torch.float64, device=device)
    low, high = facts.clone(), facts.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=axis.get_group())
    dist.all_reduce(high, dist.ReduceOp.MAX, group=axis.get_group())
    size = high[:, 1:].clamp(min=torch.finfo(torch.float32).tiny)
    apart = ((high - low) > _TOLERANCE * size).any(dim=1).tolist()
    different = [name for name, differs in zip(alike, apart, strict=True) if differs]
    if different:
        msg = f"ranks that split layers (tp_size) have different gradients of {listed(different, 3)}"
        hint = "it is computed with in parts: give its module the style replicated_with_grad_allreduce in the plan"
        raise ShardingError(msg, hint=f"{hint}, sharding.tensor_parallel_plan")


def _facts(param: nn.Parameter) -> tuple[float, float]:
    """Return the sum and the norm of this rank's shard of a parameter's gradient."""
    if param.grad is None:
        return 0.0, 0.0
    gradient = local_tensor(param.grad).double()
    return float(gradient.sum()), float(gradient.norm())
