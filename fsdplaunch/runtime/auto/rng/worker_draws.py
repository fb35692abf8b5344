"""Notice in a loader's worker processes that the items of a dataset draw random numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import get_worker_info

from fsdplaunch.runtime.auto.rng.own_generators import OwnGenerators
from fsdplaunch.runtime.auto.rng.rng_streams import equal_states, random_states
from fsdplaunch.runtime.torch_internals.data_loaders import around_fetches


class WorkerDraws:
    """A `worker_init_fn` that calls the script's own, and marks in shared memory that a batch was drawn for.

    Args:
        inner: The script's; None for none.
        collate: What makes a batch of items.
    """

    def __init__(self, inner: Callable[[int], Any] | None, collate: Any) -> None:
        self.inner, self.collate = inner, collate
        self._own = OwnGenerators()
        self._seen = torch.zeros(1, dtype=torch.uint8).share_memory_()

    def __call__(self, worker: int) -> None:
        """Begin to look, in a worker process."""
        if self.inner is not None:
            self.inner(worker)
        self._own = OwnGenerators(*self._roots())
        around_fetches(self._read)

    def _roots(self) -> tuple[Any, ...]:
        worker = get_worker_info()
        return (self.collate,) if worker is None else (worker.dataset, self.collate)

    def seen(self) -> bool:
        """Return whether any worker drew."""
        return bool(self._seen.item())

    def _read(self, fetch: Callable[[], Any]) -> Any:
        if self.seen():
            return fetch()
        before = random_states()
        batch = fetch()
        if self._own.drew() or not equal_states(before, random_states()):
            self._seen.fill_(1)
        return batch
