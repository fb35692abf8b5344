"""Data loaders give each worker its part of every batch, in the order the script's own sampler draws.

Needed because all workers run the same loop. Loaders that are read while the script evaluates stay whole on every
worker: what is computed from them, and decided by it, is then the same everywhere.
"""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import report
from fsdplaunch.runtime.auto.job import Job
from fsdplaunch.runtime.auto.ownership import script_line
from fsdplaunch.runtime.auto.parts import Items, PartOfBatches, Turns, WholeBatches
from fsdplaunch.runtime.auto.patching import replaced
from fsdplaunch.runtime.loader import _is_split, _set


@contextmanager
def dividing_loaders(job: Job) -> Iterator[None]:
    """Fit a loader when it is first read or asked for its length."""
    loaders = _Loaders(job)
    with (
        replaced(DataLoader, "__iter__", loaders.reading),
        replaced(DataLoader, "__len__", loaders.measuring),
    ):
        yield


class _Loaders:
    """The loaders of one worker's script."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.fitted: weakref.WeakSet[Any] = weakref.WeakSet()

    def _are_ours(self, loader: Any) -> bool:
        """Whether a loader is to be divided; fits it if it is."""
        job = self.job
        if job.size == 1 or not job.ownership.decided() or _is_split(loader):
            return False
        if loader not in self.fitted:
            self.fitted.add(loader)
            fit(loader, job)
        return True

    def reading(self, original: Any) -> Any:
        """What stands for a loader's `__iter__`."""

        def iterate(loader: Any) -> Any:
            if not self._are_ours(loader):
                return original(loader)
            _check_batch(loader, self.job)
            if self.job.models and not self.job.evaluating():
                self.job.streams.part()  # before the loader's processes get their seeds
            if isinstance(loader.dataset, IterableDataset):
                return _read_stream(loader, original, self.job)
            return original(loader)

        return iterate

    def measuring(self, original: Any) -> Any:
        """What stands for a loader's `__len__`."""

        def measure(loader: Any) -> int:
            if not self._are_ours(loader) or not isinstance(loader.dataset, IterableDataset):
                return int(original(loader))
            length = int(original(loader))
            return length if self.job.keeps_batch or _whole(self.job) else math.ceil(length / self.job.size)

        return measure


def _whole(job: Job) -> bool:
    return bool(job.models) and job.evaluating()


def fit(loader: Any, job: Job) -> None:
    """Give a loader the sampler that divides its batches, in place, before its first reading.

    Args:
        loader: As the script made it.
        job: This worker's.

    """
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return
    if batches is None:
        _set(loader, sampler=Items(loader.sampler, job))
        report.say(f"{script_line()}: the loader makes no batches, so ranks take turns at its items")
    elif type(batches) is BatchSampler:
        _set(loader, batch_sampler=PartOfBatches(batches, job))
    else:
        how = "each is divided" if job.keeps_batch else "ranks take turns"
        report.say(f"{type(batches).__name__}: rank 0 draws its batches, {how}")
        _set(loader, batch_sampler=WholeBatches(batches, job))


def _check_batch(loader: Any, job: Job) -> None:
    """Refuse a training batch that the workers cannot divide as asked; say once how large batches are.

    Raises:
        ShardingError: They cannot.
    """
    size = loader.batch_size
    if size is None or not job.models or job.evaluating():
        return
    if job.keeps_batch and size % job.size and size > 1:
        msg = f"{script_line()} reads batches of {size}, which {job.size} workers cannot divide evenly"
        raise ShardingError(msg, hint="change the batch size or the number of workers, or leave keep_global_batch")
    if "batch" not in job.said:
        job.said.add("batch")
        each, all_ = (size // job.size, size) if job.keeps_batch else (size, size * job.size)
        report.say(f"batches of {each} on each of {job.size} ranks, {all_} together")


def _read_stream(loader: Any, iterate: Any, job: Job) -> Any:
    """Begin to read an iterable dataset: ranks take turns at its items, batches are divided if they are to be."""
    if job.evaluating():
        return iterate(loader)
    kept = {"dataset": loader.dataset, "batch_sampler": loader.batch_sampler}
    _set(loader, dataset=Turns(loader.dataset, job))
    if loader.batch_sampler is not None and job.keeps_batch:
        part = BatchSampler(loader.sampler, loader.batch_size // job.size, loader.drop_last)
        _set(loader, batch_sampler=part)
    try:
        with job.streams.shared():  # its workers' seeds: all ranks must read one stream in one order
            return iterate(loader)
    finally:
        _set(loader, **kept)
