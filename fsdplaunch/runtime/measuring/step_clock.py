"""Take the time of optimizer steps without holding up the device."""

import time
from itertools import pairwise
from typing import Any

import torch


class StepClock:
    """The moments at which steps ended: on a GPU, moments of its stream.

    Attributes:
        on_gpu: Whether the GPU's own clock counts.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note that a step has ended; on a GPU nothing waits for it."""
        if not self.on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds between one end of a step and the next; on a GPU, after waiting for the last."""
        if self.on_gpu and self._marks:
            self._marks[-1].synchronize()
        return [self._between(*pair) for pair in pairwise(self._marks)]

    def _between(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after) / 1000 if self.on_gpu else after - before)
