"""Look into a sharded model: its sharded modules, its parameters by the user's names, those with gradients."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.inspection.parameter_names import clean_name


def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
    """Return the sharded modules of a model, of either FSDP version, outermost first.

    Args:
        module: Sharded, or with sharded modules inside.
        root_only: Leave out those that are inside another.
    """
    if root_only:
        return list(outermost(module))
    return [each for each in module.modules() if isinstance(each, FSDPModule | FullyShardedDataParallel)]


def outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost sharded modules: the model itself, or those inside what was put around it."""
    if isinstance(model, FSDPModule | FullyShardedDataParallel):
        yield model
        return
    for child in model.children():
        yield from outermost(child)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: a DTensor's shard, any other tensor itself; without its history."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def params_with_grad(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have a gradient now."""
    return [param for param in module.parameters() if param.grad is not None]


def named_parameters(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield as `module.named_parameters`, with the names the model had before anything was wrapped in it."""
    for name, param in module.named_parameters(prefix, recurse, remove_duplicate):
        yield clean_name(name), param


def named_buffers(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield as `module.named_buffers`, with the names the model had before anything was wrapped in it."""
    for name, buffer in module.named_buffers(prefix, recurse, remove_duplicate):
        yield clean_name(name), buffer
