"""PyTorch/XLA's devices, processes and mesh."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch_xla
from torch_xla import runtime
from torch_xla.core import xla_model
from torch_xla.distributed import spmd, xla_multiprocessing

FSDP_AXIS = "fsdp"
"""Axis of the mesh that parameters and batches are split along; transformers calls it so, too."""


def use_all_devices() -> None:
    """Have this process drive all of its host's devices (SPMD), in one mesh with those of other hosts."""
    # The first unit's input is token ids, which have no gradient.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    runtime.use_spmd()
    count = runtime.global_runtime_device_count()
    spmd.set_global_mesh(spmd.Mesh(np.arange(count), (count, 1), (FSDP_AXIS, "tensor")))


def spawning_module() -> Any:
    """Return the module whose `spawn` scripts call."""
    return xla_multiprocessing


def processes() -> int:
    """Return how many processes the runtime knows."""
    return int(runtime.process_count())


def participants() -> int:
    """Return how many devices exchange gradients where each process has its own; 1 before they know each other."""
    return int(runtime.world_size())


def ordinal() -> int:
    """Return this process's number among them."""
    return int(runtime.global_ordinal())


def keep_dtypes() -> None:
    """Have tensors keep their dtypes, unless XLA_USE_BF16 is set by now: it is read with the first tensor.

    On a TPU accelerate sets it under mixed_precision bf16, for models that nothing casts.
    """
    torch.zeros(1, device=device())


def rng_state() -> int:
    """Return the state of the devices' random number generator."""
    return int(xla_model.get_rng_state())


def set_rng_state(state: int) -> None:
    """Put the devices' random number generator back."""
    xla_model.set_rng_state(state)


def device() -> torch.device:
    """Return the device that tensors are put on."""
    found: torch.device = torch_xla.device()
    return found


def mesh() -> Any:
    """Return the mesh over all devices, under SPMD."""
    return spmd.get_global_mesh()


def is_spmd() -> bool:
    """Return whether one process drives several devices."""
    return bool(runtime.is_spmd())


def devices_in_words() -> str:
    """Return how many devices there are, and of which kind: `4 CPU devices`."""
    count = runtime.global_runtime_device_count() if is_spmd() else runtime.world_size()
    return f"{count} {runtime.device_type()} {'device' if count == 1 else 'devices'}"


def split_first_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Split a tensor along its first dimension over all devices, under SPMD; one without dimensions stays."""
    if tensor.dim():
        spmd.mark_sharding(tensor, mesh(), (FSDP_AXIS, *(None,) * (tensor.dim() - 1)))
    return tensor


def split_largest_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Split a parameter, or what is kept for it, along its largest dimension, as PyTorch/XLA's FSDPv2 does."""
    if tensor.dim():
        largest = list(tensor.shape).index(max(tensor.shape))
        spec = tuple(FSDP_AXIS if dim == largest else None for dim in range(tensor.dim()))
        spmd.clear_sharding(tensor)
        spmd.mark_sharding(tensor, mesh(), spec)
    return tensor


def split_output(output: Any, _mesh: Any) -> None:
    """Tell the compiler that a unit's output is split over the devices as the batch is."""
    found = _first_batch(output)
    if found is not None:
        split_first_dim(found)


def _first_batch(output: Any) -> torch.Tensor | None:
    """Return the first tensor with dimensions in what a unit returns."""
    if isinstance(output, torch.Tensor):
        return output if output.dim() else None
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, list | tuple):
        return next((found for each in output if (found := _first_batch(each)) is not None), None)
    return None


def run_step() -> None:
    """Have everything computed that was recorded so far."""
    torch_xla.sync()
