"""The copy of a state to host memory, made beside the training as far as only an optimizer's step changes it."""

import ctypes
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.saving.background.host_buffer import HostBuffer, PlacedTensor
from fsdplaunch.runtime.saving.background.trained_tensors import TrainedTensors

PIECE = 32 * 2**20
AT_ONCE = 16 * 2**20
"""Up to so many bytes are copied before the call returns: that takes milliseconds, and nothing has to wait."""
GRACE_SECONDS = 0.1
"""How long after the copy a change is still looked for: torch counts one when it ends, not when it begins."""


class HostCopies:
    """Copies of one save's tensors: what is not trained at once, the rest by `make`.

    Args:
        states: What is saved, as this rank holds it.
        buffer: Where the copies go.
        trained: What only an optimizer's step changes.
    """

    def __init__(self, states: Sequence[Any], buffer: HostBuffer, trained: TrainedTensors) -> None:
        self.states, placed = buffer.place(list(states))
        self._trained = trained
        # Numbers of steps go at once: under FSDP1 there is nothing else to wait for.
        later = [each for each in placed if each.source.dim() and trained.holds(each.source)]
        self._later = later if sum(each.place.nbytes for each in later) > AT_ONCE else []
        self._own = [each for each in placed if each.is_shard and trained.is_made_for_state_dict(each.source)]
        waiting = {id(each) for each in (*self._later, *self._own)}
        trained.watch(each.source for each in self._later)
        self._copied, self._released = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._is_checked = False
        self._changed: str | None = None
        at_once = [each for each in placed if id(each) not in waiting]
        self._stream = _copy_from_device(at_once, [*self._later, *self._own])
        _copy_on_host(at_once)
        if not self._later:
            self._copied.set()

    def make(self) -> None:
        """Make the copies; called by another thread than the one that trains.

        Raises:
            CheckpointError: A parameter was changed by something other than a step before its copy was complete.
        """
        try:
            _copy_on_host(self._later)
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._copied.set()
        while self._own:
            _copy_on_host([self._own.pop()])  # and its memory is given back
        self._released.wait(GRACE_SECONDS)
        self._check()
        self._later = []
        if self._changed is not None:
            msg = f"{self._changed} was changed by something other than an optimizer's step while it was copied"
            hint = "change it before save_checkpoint or after the next step, or set checkpoint.async to false"
            raise CheckpointError(msg, hint=hint)

    def wait(self) -> None:
        """Wait until what is trained has been copied; called by who is about to change it."""
        self._copied.wait()
        self._check()
        self._released.set()

    def _check(self) -> None:
        with self._lock:
            if not self._is_checked:
                self._is_checked, self._changed = True, self._trained.changed()


def _copy_on_host(tensors: Iterable[PlacedTensor]) -> None:
    """Copy what is on the host, in one thread and without the interpreter's lock, so that training goes on."""
    for each in tensors:
        source, place = each.source, each.place
        if source.device.type != "cpu":
            continue
        if not source.is_contiguous() or source.is_conj() or source.is_neg():
            place.copy_(source)
            continue
        size = source.numel() * source.element_size()
        for offset in range(0, size, PIECE):
            begin, count = source.data_ptr() + offset, min(PIECE, size - offset)
            ctypes.memmove(place.data_ptr() + offset, begin, count)


def _copy_from_device(at_once: list[PlacedTensor], later: list[PlacedTensor]) -> Any:
    """Begin to copy what is on GPUs, and return the stream that does; None without any.

    What computes on the GPU afterwards waits there for the tensors of `at_once`, the script does not.
    """
    if not any(each.source.is_cuda for each in (*at_once, *later)):
        return None
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        _enqueue(at_once)
        current.wait_event(stream.record_event())
        _enqueue(later)
    return stream


def _enqueue(tensors: Iterable[PlacedTensor]) -> None:
    for each in tensors:
        if each.source.is_cuda:
            each.place.copy_(each.source, non_blocking=True)
