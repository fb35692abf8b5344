"""PyTorch/XLA's devices, processes and mesh."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch_xla
from torch_xla import runtime
from torch_xla.distributed import spmd

FSDP_AXIS = "fsdp"  # axis of the mesh that parameters and batches are split along; transformers calls it so, too


def use_all_devices() -> None:
    """Have this process drive all of its host's devices (SPMD), in one mesh with those of other hosts."""
    # The first unit's input is token ids, which have no gradient.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    runtime.use_spmd()
    count = runtime.global_runtime_device_count()
    spmd.set_global_mesh(spmd.Mesh(np.arange(count), (count, 1), (FSDP_AXIS, "tensor")))


def keep_dtypes() -> None:
    """Have tensors keep their dtypes, unless XLA_USE_BF16 is set by now: it is read with the first tensor.

    On a TPU accelerate sets it under mixed_precision bf16, for models that nothing casts.
    """
    torch.zeros(1, device=torch_xla.device())


def split_first_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Split a tensor along its first dimension over all devices, under SPMD; one without dimensions stays."""
    if tensor.dim():
        spmd.mark_sharding(tensor, spmd.get_global_mesh(), (FSDP_AXIS, *(None,) * (tensor.dim() - 1)))
    return tensor


def split_largest_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Split a parameter, or what is kept for it, along its largest dimension, as PyTorch/XLA's FSDPv2 does."""
    if tensor.dim():
        largest = list(tensor.shape).index(max(tensor.shape))
        spec = tuple(FSDP_AXIS if dim == largest else None for dim in range(tensor.dim()))
        spmd.clear_sharding(tensor)
        spmd.mark_sharding(tensor, spmd.get_global_mesh(), spec)
    return tensor


def split_output(output: Any, _mesh: Any) -> None:
    """Tell the compiler that a unit's output is split as the batch is: the first tensor with dimensions in it."""
    found = _first_batch(output)
    if found is not None:
        split_first_dim(found)


def _first_batch(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output if output.dim() else None
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, list | tuple):
        return next((found for each in output if (found := _first_batch(each)) is not None), None)
    return None
