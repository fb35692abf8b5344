"""How core reaches what lets rank 0 save alone: hooks of unmodified scripts provide it, when a model is sharded.

Without it every call that gathers shards is one that all ranks make.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.collectives.monitored_barrier import monitored_barrier


class Rank0Service(Protocol):
    """Gives rank 0 full tensors while the other ranks are elsewhere."""

    def meets(self, call: str, hint: str, ranks: Sequence[int] | None = None) -> bool:
        """Wait until all ranks are in this call, or until rank 0 knows that the others are not.

        Args:
            call: What it is, the same on all ranks.
            hint: What to do where only some ranks make the call.
            ranks: Those that must make it, this one among them; left out, all.

        Returns:
            Whether all are in it. False on rank 0 only: it may go on alone, and call `full`.

        Raises:
            CheckpointError: Some ranks are in it and some are not, or a rank has ended.
        """

    def full(self, tensor: DTensor, call: str) -> torch.Tensor:
        """Return the full tensor in host memory, on rank 0 alone, after `meets` was False.

        Raises:
            CheckpointError: The other ranks do not have it as it is now, or one has ended.
        """

    def done(self) -> None:
        """End what rank 0 has done alone: the other ranks may go on."""


_provided: list[Rank0Service] = []


def provide(service: Rank0Service | None) -> None:
    """Have rank 0 ask this service from now on; None takes it away."""
    _provided[:] = [] if service is None else [service]


def current() -> Rank0Service | None:
    """Return the service; None while nothing provides one."""
    return _provided[0] if _provided else None


def meets(call: str, hint: str, ranks: Sequence[int] | None = None) -> bool:
    """Do what `Rank0Service.meets` does; without a service wait for all ranks, and return True.

    Raises:
        CheckpointError: Some ranks do not come.
    """
    service = current()
    if service is not None:
        return service.meets(call, hint, ranks)
    monitored_barrier(call, hint, ranks)
    return True
