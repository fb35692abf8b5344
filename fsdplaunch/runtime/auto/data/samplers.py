"""One worker's share of batches, of items, and of streams.

All ranks draw the complete order, from the same random stream, and take their share of it, so that no rank waits
for another. Orders of samplers other than torch's are drawn by rank 0 and sent: how they draw is not known.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import cycle, islice
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, Sampler, get_worker_info

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.same_data import tell_other_data
from fsdplaunch.runtime.auto.rng.rng_streams import random_states, set_random_states
from fsdplaunch.runtime.collectives.rank_group import from_rank_0
from fsdplaunch.runtime.script_line import script_line


def rounds(sampler: Any, size: int, hook_context: HookContext) -> Iterator[list[Any]]:
    """Draw a sampler's order a few items at a time, the same on every rank, for it may be long or endless.

    Args:
        sampler: Of items, or of batches.
        size: How many to draw at once; a last round may have fewer.
        hook_context: This worker's.
    """
    if type(sampler).__module__.startswith("torch."):
        yield from _drawn_by_all(iter(sampler), size, hook_context)
    else:
        yield from _drawn_by_first(sampler, size, hook_context)


def _drawn_by_all(items: Iterator[Any], size: int, hook_context: HookContext) -> Iterator[list[Any]]:
    while True:
        with hook_context.streams.shared():
            round_ = list(islice(items, size))
        if round_:
            yield round_
        if len(round_) < size:
            return


def _drawn_by_first(sampler: Any, size: int, hook_context: HookContext) -> Iterator[list[Any]]:
    """Draw on rank 0 and send: at first one round, then more at once, so that sending costs little.

    Rank 0 sends what its random streams have become as well, which others share and do not draw from here.
    """
    items = iter(sampler) if hook_context.rank == 0 else iter(())
    ahead = 1
    while True:
        with hook_context.streams.shared():
            sent = _sent(list(islice(items, size * ahead)), hook_context)
        yield from (sent[start : start + size] for start in range(0, len(sent), size))
        if len(sent) < size * ahead:
            return
        if not hook_context.keeps_batch:  # what it draws may stand between draws of the training
            ahead = min(2 * ahead, _MOST_AHEAD)


_MOST_AHEAD = 16
"""Rounds that are drawn at once from a sampler of the script's own."""


def _sent(items: list[Any], hook_context: HookContext) -> list[Any]:
    sent, states = from_rank_0((items, random_states()) if hook_context.rank == 0 else None)
    if hook_context.rank:
        set_random_states(states)
    return list(sent)


def filled(items: list[Any], multiple: int, first: list[Any]) -> list[Any]:
    """Append items of an epoch's first round, again and again if need be, until the number is a multiple."""
    missing = -len(items) % multiple
    return items + list(islice(cycle(first or items), missing)) if items else items


def own_share(batch: list[Any], first: list[Any], hook_context: HookContext) -> list[Any]:
    """Return this rank's part of a batch, after filling up a last one that cannot be divided.

    One of fewer items than ranks, where the global batch is kept, is each rank's as a whole.
    """
    if hook_context.keeps_batch:
        tell_undivided(len(batch), hook_context, always=not first or len(first) < hook_context.data.size)
        if len(batch) < hook_context.data.size:
            return batch
    full = filled(batch, hook_context.data.size, first)
    each = len(full) // hook_context.data.size
    hook_context.batches.note(each)
    return full[hook_context.data.rank * each : (hook_context.data.rank + 1) * each]


def _own_turns(inner: Any, hook_context: HookContext) -> Iterator[Any]:
    """Yield one of each round of as many items, or batches, as there are ranks; a last round is filled up."""
    first: list[Any] = []
    for round_ in rounds(inner, hook_context.data.size, hook_context):
        first = first or round_
        hook_context.batches.divided = True
        yield filled(round_, hook_context.data.size, first)[hook_context.data.rank]


def tell_undivided(size: int, hook_context: HookContext, *, always: bool = False) -> None:
    """Print once that a batch cannot be divided, as the last one of an epoch may be.

    Args:
        size: Its items.
        hook_context: This worker's.
        always: Whether all batches are of so few items that each rank computes all of them.
    """
    ranks, printed = hook_context.data.size, hook_context.printed
    if not size % ranks:
        return
    if size < ranks and always:
        hook_context.batches.read_by = f"a batch of {size} cannot be divided: each rank computes all of it"
        return
    if "undivided" in printed:
        return
    printed.add("undivided")
    what = (
        f"filled up with {-size % ranks} of the first items for {ranks} ranks, so its step is not quite that of"
        " one process"
        if size > ranks
        else f"computed as a whole by each of {ranks} ranks: a loss that is a sum is not that of one process there"
    )
    messages.say_unequal(f"a batch of {size} is {what} (drop_last=True leaves such batches out)")


@contextmanager
def _telling_late_evaluation(hook_context: HookContext) -> Iterator[None]:
    """Print, once a loader was read to its end, that it was divided although the script evaluated by it.

    It is divided where it was begun before `model.eval()` or `torch.no_grad()`: nothing tells then what it is for.
    """
    before = hook_context.batches.backwards
    yield
    evaluated = hook_context.models and hook_context.evaluating() and hook_context.batches.backwards == before
    if evaluated and "late evaluation" not in hook_context.printed:
        hook_context.printed.add("late evaluation")
        messages.say_unequal(
            f"{script_line()}: each rank evaluates its own share of the rows, for the loader was begun before "
            "model.eval() or torch.no_grad()\n  try  call model.eval() before the loop"
        )


class RankBatches(BatchSampler):
    """This rank's share of each batch of items that are drawn one by one.

    The workers' batches together are the script's own, or as many of the script's size as there are workers.
    """

    def __init__(self, inner: BatchSampler, hook_context: HookContext) -> None:
        self.inner, self.hook_context = inner, hook_context
        self.sampler, self.drop_last, self.batch_size = inner.sampler, inner.drop_last, inner.batch_size
        self.together = self.batch_size if hook_context.keeps_batch else self.batch_size * hook_context.data.size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield an epoch of batches; decided at the first one whether the script trains or evaluates."""
        if self.hook_context.evaluating():
            yield from self.inner
            return
        first: list[int] = []
        with _telling_late_evaluation(self.hook_context):
            for batch in rounds(self.sampler, self.together, self.hook_context):
                if len(batch) < self.together and self.drop_last:
                    self._check_length(first, batch)
                    return
                first = first or batch
                yield own_share(batch, first, self.hook_context)

    def _check_length(self, first: list[int], last: list[int]) -> None:
        """Refuse a loader of which nothing would be left."""
        if not first:
            msg = f"the loader has {len(last)} items, less than one batch of {self.together} for all workers"
            raise ShardingError(msg, hint="use fewer workers, smaller batches, or launch.keep_global_batch")

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
        if not self.hook_context.keeps_batch:
            yield from _own_turns(self.inner, self.hook_context)
            return
        first: list[Any] = []
        with _telling_late_evaluation(self.hook_context):
            for (batch,) in rounds(self.inner, 1, self.hook_context):
                first = first or list(batch)
                yield own_share(list(batch), first, self.hook_context)

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        complete = self.hook_context.keeps_batch or (self.hook_context.models and self.hook_context.evaluating())
        return len(self.inner) if complete else math.ceil(len(self.inner) / self.hook_context.data.size)

    def __getattr__(self, name: str) -> Any:
        """Return whatever else the script's sampler offers."""
        return _offered(self, "inner", name)


class RankItems(Sampler[Any]):
    """This rank's items of a loader that makes no batches; all of them where the global batch is kept."""

    def __init__(self, inner: Any, hook_context: HookContext) -> None:
        self.inner, self.hook_context = inner, hook_context

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch of items."""
        if self.hook_context.evaluating():
            yield from self.inner
        elif self.hook_context.keeps_batch:
            for round_ in rounds(self.inner, 1, self.hook_context):
                yield from round_
        else:
            yield from _own_turns(self.inner, self.hook_context)

    def __len__(self) -> int:
        """Return how many items an epoch has."""
        complete = self.hook_context.keeps_batch or (self.hook_context.models and self.hook_context.evaluating())
        return len(self.inner) if complete else math.ceil(len(self.inner) / self.hook_context.data.size)

    def __getattr__(self, name: str) -> Any:
        """Return whatever else the script's sampler offers."""
        return _offered(self, "inner", name)


def _offered(wrapper: Any, kept: str, name: str) -> Any:
    """Return an attribute of what a wrapper stands for, which its `kept` has."""
    if name.startswith("__") or name == kept:
        raise AttributeError(name)
    return getattr(getattr(wrapper, kept), name)


class RankTurns(IterableDataset[Any]):
    """This rank's items of a stream: ranks take turns, and what is left of a last round is left out."""

    def __init__(self, stream: Any, hook_context: HookContext, turn: int = 1) -> None:
        self.turn = turn
        self.hook_context = hook_context
        self.stream, self.rank, self.size, self.streams = (
            stream,
            hook_context.data.rank,
            hook_context.data.size,
            hook_context.streams,
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's items, `turn` of them in a row."""
        guarded = get_worker_info() is None  # a worker process was seeded alike on all ranks
        items = iter(self.stream)
        compares = guarded
        while True:
            with self.streams.shared() if guarded else nullcontext():
                round_ = list(islice(items, self.size * self.turn))
            if compares:
                tell_other_data(round_, self.hook_context)
            compares = False
            own = len(round_) // self.size
            yield from round_[self.rank * own : (self.rank + 1) * own]
            if own < self.turn:
                return

    def __len__(self) -> int:
        """Return what the stream gives: the loader computes its own length from it."""
        return len(self.stream)

    def __getattr__(self, name: str) -> Any:
        """Return whatever else the stream offers."""
        return _offered(self, "stream", name)
