"""PyTorch/XLA's devices, processes and mesh."""

import warnings
from typing import Any

import numpy as np
import torch
import torch_xla
from torch_xla import runtime
from torch_xla.distributed import spmd, xla_multiprocessing

from fsdplaunch.runtime.torch_internals.xla import begin_process
from fsdplaunch.runtime.xla.entry import spawn_here

FSDP_AXIS = "fsdp"
"""Axis of the mesh that parameters and batches are split along; transformers calls it so, too."""


def begin(local_rank: int, local_processes: int) -> None:
    """Tell the runtime which of this host's processes this is; nothing has used a device before.

    Args:
        local_rank: This process's number on its host.
        local_processes: How many there are.
    """
    if local_processes > 1:
        begin_process(local_rank, local_processes)


def use_all_devices() -> None:
    """Have this process drive all of its host's devices (SPMD), in one mesh with those of other hosts."""
    # The first unit's input is token ids, which have no gradient.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    runtime.use_spmd()
    count = runtime.global_runtime_device_count()
    spmd.set_global_mesh(spmd.Mesh(np.arange(count), (count, 1), (FSDP_AXIS, "tensor")))


def take_over_spawn() -> None:
    """Have a script's `xmp.spawn` call its function in this process, which was started for it."""
    spawn_here(xla_multiprocessing, runtime.global_ordinal)


def processes() -> int:
    """Return how many processes the runtime knows."""
    return int(runtime.process_count())


def device() -> torch.device:
    """Return the device that tensors are put on."""
    found: torch.device = torch_xla.device()
    return found


def mesh() -> Any:
    """Return the mesh over all devices, under SPMD."""
    return spmd.get_global_mesh()


def is_spmd() -> bool:
    """Tell whether one process drives several devices."""
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


def run_step() -> None:
    """Have everything computed that was recorded so far."""
    torch_xla.sync()
