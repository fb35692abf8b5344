"""Look into a sharded model: its sharded modules, this rank's shards, the parameters with gradients."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.inspection.parameter_names import parameters_of
from fsdplaunch.runtime.inspection.units import is_sharded


def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
    """Return the sharded modules of a model, of either FSDP version, outermost first.

    Args:
        module: Sharded, or with sharded modules inside.
        root_only: Leave out those that are inside another.
    """
    if root_only:
        return list(outermost(module))
    return [each for each in module.modules() if is_sharded(each)]


def outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost sharded modules: the model itself, or those inside what was put around it."""
    if is_sharded(model):
        yield model
        return
    for child in model.children():
        yield from outermost(child)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: a DTensor's shard, any other tensor itself; without its history."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def full_tensor(tensor: Any) -> Any:
    """Return a DTensor's full tensor, anything else itself; collective for the former."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as bytes, whatever its dtype is: a copy where it is not contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def params_with_grad(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have a gradient now."""
    return [param for param in parameters_of(module) if param.grad is not None]
