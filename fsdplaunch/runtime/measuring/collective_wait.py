"""Measure how long a worker on the CPU waits in collectives: there a call returns when the others have come.

On a GPU a call only puts work into a stream, and its time says nothing.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_CALLS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_tensor",
)


class CollectiveWait:
    """The time spent in collectives, counted once where one calls another.

    Attributes:
        seconds: Since the process began.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def install(self) -> None:
        """Begin to measure, until the process ends."""
        for name in _CALLS:
            setattr(dist, name, self._timed(getattr(dist, name)))
        setattr(dist.Work, "wait", self._timed(dist.Work.wait))  # noqa: B010  (a method, for mypy)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began

        return timed
