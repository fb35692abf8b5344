"""One worker's share of batches, of items, and of streams.

All ranks draw the complete order, from the same random stream, and take their share of it, so that no rank waits
for another. Orders of samplers other than torch's are drawn by rank 0 and sent: how they draw is not known.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, IterableDataset, Sampler, get_worker_info

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.context import HookContext


def drawn(sampler: Any, hook_context: HookContext) -> list[Any]:
    """Draw one epoch's order, the same on every rank."""
    if type(sampler).__module__.startswith("torch."):
        with hook_context.streams.shared():
            return list(sampler)
    box: list[Any] = [list(sampler) if hook_context.rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    items: list[Any] = box[0]
    return items


def filled(items: list[Any], multiple: int) -> list[Any]:
    """Repeat items from the start until their number is a multiple."""
    missing = -len(items) % multiple
    return items + (items * math.ceil(missing / len(items)))[:missing] if missing and items else items


class RankBatches(BatchSampler):
    """This rank's share of each batch of items that are drawn one by one.

    The workers' batches together are the script's own, or as many of the script's size as there are workers.
    """

    def __init__(self, inner: BatchSampler, hook_context: HookContext) -> None:
        self.inner, self.hook_context = inner, hook_context
        self.sampler, self.drop_last, self.batch_size = inner.sampler, inner.drop_last, inner.batch_size
        self.together = (
            max(self.batch_size, hook_context.size)
            if hook_context.keeps_batch
            else self.batch_size * hook_context.size
        )

    def __iter__(self) -> Iterator[list[int]]:
        """Yield an epoch of batches; decided at the first one whether the script trains or evaluates."""
        if self.hook_context.evaluating():
            yield from self.inner
            return
        order = drawn(self.sampler, self.hook_context)
        if self.drop_last and 0 < len(order) < self.together:
            msg = f"the loader has {len(order)} items, less than one batch of {self.together} for all workers"
            raise ShardingError(msg, hint="use fewer workers, smaller batches, or launch.keep_global_batch")
        for start in range(0, len(order), self.together):
            batch = order[start : start + self.together]
            if len(batch) < self.together and self.drop_last:
                return
            if len(batch) < self.together:
                batch = batch + order[: -len(batch) % self.hook_context.size]
                batch = filled(batch, self.hook_context.size)
            each = len(batch) // self.hook_context.size
            yield batch[self.hook_context.rank * each : (self.hook_context.rank + 1) * each]

    def __len__(self) -> int:
        """Return how many batches an epoch has, of training unless the script evaluates."""
        if self.hook_context.models and self.hook_context.evaluating():
            return len(self.inner)
        items = len(self.sampler)  # type: ignore[arg-type]
        return items // self.together if self.drop_last else math.ceil(items / self.together)


class FullBatches(Sampler[Any]):
    """This rank's share of batches that a sampler of the script's own makes."""

    def __init__(self, inner: Any, hook_context: HookContext) -> None:
        self.inner, self.hook_context = inner, hook_context

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch of batches."""
        if self.hook_context.evaluating():
            yield from self.inner
            return
        batches = drawn(self.inner, self.hook_context)
        if self.hook_context.keeps_batch:
            for batch in batches:
                full = filled(list(batch), self.hook_context.size)
                each = len(full) // self.hook_context.size
                yield full[self.hook_context.rank * each : (self.hook_context.rank + 1) * each]
        else:
            yield from filled(batches, self.hook_context.size)[self.hook_context.rank :: self.hook_context.size]

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        complete = self.hook_context.keeps_batch or (self.hook_context.models and self.hook_context.evaluating())
        return len(self.inner) if complete else math.ceil(len(self.inner) / self.hook_context.size)


class RankItems(Sampler[Any]):
    """This rank's items of a loader that makes no batches."""

    def __init__(self, inner: Any, hook_context: HookContext) -> None:
        self.inner, self.hook_context = inner, hook_context

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch of items."""
        if self.hook_context.evaluating():
            yield from self.inner
            return
        yield from filled(drawn(self.inner, self.hook_context), self.hook_context.size)[
            self.hook_context.rank :: self.hook_context.size
        ]

    def __len__(self) -> int:
        """Return how many items an epoch has."""
        complete = self.hook_context.models and self.hook_context.evaluating()
        return len(self.inner) if complete else math.ceil(len(self.inner) / self.hook_context.size)


class RankTurns(IterableDataset[Any]):
    """This rank's items of a stream: ranks take turns, and a last incomplete round is left out."""

    def __init__(self, stream: Any, hook_context: HookContext) -> None:
        self.stream, self.rank, self.size, self.streams = (
            stream,
            hook_context.rank,
            hook_context.size,
            hook_context.streams,
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's items."""
        guarded = get_worker_info() is None  # a worker process was seeded alike on all ranks
        items = iter(self.stream)
        while True:
            with self.streams.shared() if guarded else nullcontext():
                round_ = list(islice(items, self.size))
            if len(round_) < self.size:
                return
            yield round_[self.rank]

    def __len__(self) -> int:
        """Return what the stream gives: the loader computes its own length from it."""
        return len(self.stream)

    def __getattr__(self, name: str) -> Any:
        """Return whatever else the stream offers."""
        if name.startswith("__") or name == "stream":
            raise AttributeError(name)
        return getattr(self.stream, name)
