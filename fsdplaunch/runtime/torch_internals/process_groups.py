"""The default group's store, how long a group's collectives wait, and how groups end."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.distributed import distributed_c10d

from fsdplaunch.probe.torch_version import parse


def default_store() -> Any:
    """Return the key-value store the ranks met in; all versions."""
    return distributed_c10d._get_default_store()


def default_timeout() -> float:
    """Return how many seconds collectives of all ranks wait on the CPU; 600 where torch is silent."""
    group = distributed_c10d.group.WORLD
    backend_of: Any = getattr(group, "_get_backend", None)
    try:
        return float(backend_of(torch.device("cpu")).options._timeout.total_seconds())
    except (AttributeError, RuntimeError, TypeError):
        return 600.0


def issued_collectives() -> int:
    """Return how many collectives this rank has issued in the default group; 0 where there is no group.

    By its sequence numbers, which torch compares to find ranks that call different collectives: one for each
    device's backend. Collectives that return before they are done count when they are issued. All versions.
    """
    group: Any = distributed_c10d.group.WORLD
    if group is None:
        return 0
    return sum(group._get_backend(device)._get_sequence_number_for_group() for device in group._device_types)


def keep_groups_from_being_freed() -> None:
    """Hold every group until the process ends, in 2.7; they can still be destroyed.

    Freeing a group joins gloo's threads while Python's lock is held, and a thread needs that lock to free the
    tensors of its last collective: a worker that waits for itself at its end. Seen in 2.7, under load; 2.15 ends
    with SIGABRT when such a group is there at its exit.
    """
    if parse(torch.__version__) == (2, 7):
        for group in distributed_c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def all_gather(every: torch.Tensor, own: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> None:
    """Write the tensors of all ranks one after the other into one; collective.

    `all_gather_into_tensor` until 2.12, which warns from 2.13 on that it is called `all_gather_single`.
    """
    dist: Any = torch.distributed
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(every, own, group=group)
