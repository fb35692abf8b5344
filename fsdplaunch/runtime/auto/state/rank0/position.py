"""Where this rank's script is: counts that are the same on all ranks whenever they are at the same place.

A rank whose count of passes or collectives is larger than another's waits for it: nothing it has can change before
the other one gets there. That makes its shards safe to read from another thread.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import is_in_flat_parameter

_COLLECTIVES = (
    *("barrier", "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
)


class Position:
    """One rank's place.

    Attributes:
        steps: Optimizer steps made, of all optimizers that train shards: others may be one rank's own.
        passes: Forward passes begun, of all sharded models.
        collectives: Calls of torch.distributed that the script made.
        states: Calls of `state_dict()` of optimizers that train what FSDP1 has divided.
        met: Calls that every rank must make, and in which all have met; and those of the ranks of one replica.
        inside: The call that every rank must make and that this one is in, or None.
        stepped_at: The counts and `met` when the last such step was made.
        ended: Whether the script is at its end, or has destroyed the process group.
        event: On a GPU, what was computed when a count last changed; None elsewhere.
    """

    def __init__(self) -> None:
        self.steps = self.passes = self.collectives = 0
        self.states = 0
        self.met = [0, 0]
        self.stepped_at: tuple[int, ...] = ()
        self.inside: str | None = None
        self.ended = False
        self.event: torch.cuda.Event | None = None
        self.moved = threading.Condition()

    def counts(self) -> tuple[int, int]:
        """Return how far the script is between two optimizer steps."""
        return self.passes, self.collectives

    def note_step(self) -> None:
        """Note that an optimizer has trained shards."""
        self.steps += 1
        self.stepped_at = (self.passes, self.collectives, *self.met)

    def is_after_step(self) -> bool:
        """Return whether nothing that all ranks do has followed the last step: rank 0 may save what it made."""
        return self.stepped_at == (*self.counts(), *self.met)

    def begin_pass(self) -> None:
        """Note that a sharded model is called."""
        self.passes += 1
        self.note()

    def end(self) -> None:
        """Note that the script is at its end."""
        self.ended = True
        self.note()

    def note(self) -> None:
        """Let the serving thread, if it waits for this rank, look again."""
        if torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record()
        with self.moved:
            self.moved.notify_all()

    @contextmanager
    def being_inside(self, call: str) -> Iterator[None]:
        """Note that this rank is in a call that every rank must make."""
        self.inside = call
        self.note()
        try:
            yield
        finally:
            self.inside = None


def trains_shards(optimizer: Optimizer) -> bool:
    """Return whether an optimizer trains what is divided over ranks, which all of them step."""
    trained = (param for group in optimizer.param_groups for param in group["params"])
    return any(isinstance(param, DTensor) or is_in_flat_parameter(param) for param in trained)


@contextmanager
def counting(position: Position) -> Iterator[None]:
    """Count optimizer steps and the script's collectives."""

    def count_step(optimizer: Optimizer, *_: Any) -> None:
        if trains_shards(optimizer):
            position.note_step()

    def counted(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            position.collectives += 1
            position.note()
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_post_hook(count_step).remove)
        for name in _COLLECTIVES:
            stack.enter_context(replaced(dist, name, counted))
        yield
