"""The default meaning of a batch: each worker reads its share of what loaders give, as under DDP. Rule 2.

All workers run the same loop. A share has the script's batch size, and is taken of the order that the script's
own sampler draws. Loaders that are read while the script evaluates stay complete on every worker: what is computed
from them, and decided by it, is then the same everywhere. With the global batch kept every worker reads it whole.
What each worker has of its own rows, running statistics and metrics, is aligned where the script decides by it.
"""

import functools
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, IterableDataset, Sampler, get_worker_info

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto import HookContext
from fsdplaunch.runtime.auto.model.forward_backward import original_name
from fsdplaunch.runtime.auto.rank0.position import trains_shards
from fsdplaunch.runtime.auto.rank0.service import check_all_ranks
from fsdplaunch.runtime.collectives.rank_group import from_all, from_rank_0
from fsdplaunch.runtime.data_loaders import LikeInner, count_readers, is_split, set_attributes
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.patch import wrap_once_imported
from fsdplaunch.runtime.random_numbers import random_states, set_random_states
from fsdplaunch.runtime.torch_internals.modules import BatchNorm, is_persistent, own_buffers

_fitted: weakref.WeakSet[Any] = weakref.WeakSet()  # the loaders that give each worker its share
_early: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()
"""The lengths that were asked for before it was known who shards, and the script's lines."""


def _is_ours(loader: Any, hook_context: HookContext) -> bool:
    """Return whether a loader is to be divided, after dividing it if it is."""
    if hook_context.size == 1 or hook_context.keeps_batch:
        return False
    divides, split = hook_context.ownership.decided(), is_split(loader)
    if split and hook_context.ownership.ours and hook_context.data.size < hook_context.size:
        count_readers(loader, hook_context.data)
    if split or not divides or hook_context.data.size == 1:
        return False
    if loader not in _fitted:
        _fitted.add(loader)
        _fit(loader, hook_context)
    return True


def read(original: Any, hook_context: HookContext, loader: Any) -> Any:
    """Stand for a loader's `__iter__`: it is divided when it is first read, or its length is."""
    batches = hook_context.batches
    if not _is_ours(loader, hook_context):
        batches.complete = False
        return original(loader)
    batches.complete = evaluates = hook_context.evaluating()
    if hook_context.models and not evaluates:
        if (size := loader.batch_size) is not None:
            ranks = hook_context.data.size
            together = f"{size * ranks} together"
            hook_context.say_once(f"batches of {size} on each of {ranks} ranks, {together}", key="batch")
        hook_context.streams.diverge()  # before the loader's processes get their seeds
        # Print that a length which was asked for before it was known who shards no longer holds.
        length, line = _early.pop(loader, (None, ""))
        if length is not None and len(loader) != length:
            messages.say(
                f"{line}: len() of the loader was {length}, before it was known who shards, but each rank reads"
                f" {len(loader)} batches: a schedule or a last save based on it is wrong; with --shard"
                " always it is known from the start"
            )
    if not isinstance(loader.dataset, IterableDataset) or evaluates:
        return original(loader)
    batches.divided = True
    stream = loader.dataset  # of which ranks take turns at the items
    set_attributes(loader, dataset=RankStream(stream, hook_context))
    try:
        with hook_context.streams.shared():  # its workers' seeds: all ranks must read one stream in one order
            return original(loader)
    finally:
        set_attributes(loader, dataset=stream)


def measure(original: Any, hook_context: HookContext, loader: Any) -> int:
    """Stand for a loader's `__len__`."""
    ours, length = _is_ours(loader, hook_context), int(original(loader))
    if hook_context.size > 1 and hook_context.ownership.ours is None and not hook_context.keeps_batch:
        _early.setdefault(loader, (length, script_line()))
    complete = bool(hook_context.models) and hook_context.evaluating()
    if not ours or complete or not isinstance(loader.dataset, IterableDataset):
        return length
    return math.ceil(length / hook_context.data.size)


def _fit(loader: Any, hook_context: HookContext) -> None:
    """Give a loader the sampler that takes this rank's share, in place, before its first reading."""
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return
    # What repeats torch's batches without end, as in YOLOv5's loaders, has the length of those within.
    endless = not hasattr(type(batches), "__len__") and hasattr(batches, "__dict__")
    repeated = [name for name, each in vars(batches).items() if type(each) is BatchSampler] if endless else []
    if batches is None:
        set_attributes(loader, sampler=RankSampler(loader.sampler, hook_context))
    elif repeated:
        setattr(batches, repeated[0], RankSampler(getattr(batches, repeated[0]), hook_context))
    else:
        if type(batches) is not BatchSampler:
            messages.say(f"{type(batches).__name__}: rank 0 draws its batches, ranks take turns")
        set_attributes(loader, batch_sampler=RankSampler(batches, hook_context))


class RankSampler(LikeInner, Sampler[Any]):
    """This rank's share of what a sampler draws: of torch's batches equal parts, of any other's items turns.

    A batch of torch's is as many items of the script's size as there are ranks. Of a sampler of the script's own
    rank 0 draws, for how it draws is not known. A last round is filled up.
    """

    def __init__(self, inner: Any, hook_context: HookContext) -> None:
        self.inner, self.hook_context = inner, hook_context
        batches = type(inner) is BatchSampler
        self.source: Any = inner.sampler if batches else inner
        self.each: int = inner.batch_size if batches else 0
        self.together = max(self.each, 1) * hook_context.data.size
        self.leaves_out = batches and inner.drop_last

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch; decided at its begin whether the script trains or evaluates."""
        context, data = self.hook_context, self.hook_context.data
        if context.evaluating():
            yield from self.inner
            return
        first: list[Any] = []
        with _warning_of_late_evaluation(context):
            for items in _rounds(self.source, self.together, context):
                if len(items) < self.together and self.leaves_out:
                    if not first:
                        has = f"the loader has {len(items)} items"
                        msg = f"{has}, less than one batch of {self.together} for all workers"
                        hint = "use fewer workers, smaller batches, or launch.keep_global_batch"
                        raise ShardingError(msg, hint=hint)
                    return
                first = first or items
                # A last round is filled up with items of the first, again and again if need be.
                full = items + list(islice(cycle(first), -len(items) % data.size))
                share = len(full) // data.size
                context.batches.divided = True
                mine = full[data.rank * share : (data.rank + 1) * share]
                yield mine if self.each else mine[0]

    def __len__(self) -> int:
        """Return how many an epoch has, of training unless the script evaluates."""
        if self.hook_context.models and self.hook_context.evaluating():
            return len(self.inner)
        items: int = len(self.source)
        return items // self.together if self.leaves_out else math.ceil(items / self.together)


class RankStream(LikeInner, IterableDataset[Any]):
    """This rank's items of a stream: ranks take turns, and what is left of a last round is left out."""

    def __init__(self, inner: Any, hook_context: HookContext) -> None:
        self.inner, self.streams = inner, hook_context.streams
        self.rank, self.size = hook_context.data.rank, hook_context.data.size

    def __iter__(self) -> Iterator[Any]:
        here = get_worker_info() is None  # a worker process was seeded alike on all ranks
        items = None
        while True:
            with self.streams.shared() if here else nullcontext():
                # Not before: it may draw an order at once.
                items = iter(self.inner) if items is None else items
                turn = list(islice(items, self.size))
            if len(turn) < self.size:
                return
            yield turn[self.rank]

    def __len__(self) -> int:
        """Return what the stream gives: the loader computes its own length from it."""
        return len(self.inner)


def _rounds(sampler: Any, size: int, hook_context: HookContext) -> Iterator[list[Any]]:
    """Draw a sampler's order a few items at a time, the same on every rank, for it may be long or endless.

    All ranks draw what torch's samplers draw. Of others rank 0 draws and sends, at first one round, then more at
    once, with what its random numbers have become.
    """
    by_all = type(sampler).__module__.startswith("torch.")
    items = iter(sampler) if by_all or hook_context.rank == 0 else iter(())
    ahead = 1
    while True:
        with hook_context.streams.shared():
            drawn = list(islice(items, size * ahead))
            if not by_all:
                drawn, states = from_rank_0((drawn, random_states()) if hook_context.rank == 0 else None)
                if hook_context.rank:
                    set_random_states(states)
        yield from (drawn[start : start + size] for start in range(0, len(drawn), size))
        if len(drawn) < size * ahead:
            return
        ahead = 1 if by_all else min(2 * ahead, _MOST_AHEAD)


_MOST_AHEAD = 16  # rounds that are drawn at once from a sampler of the script's own


@contextmanager
def _warning_of_late_evaluation(hook_context: HookContext) -> Iterator[None]:
    before = hook_context.batches.backwards
    yield
    evaluated = hook_context.models and hook_context.evaluating() and hook_context.batches.backwards == before
    if evaluated and "late evaluation" not in hook_context.printed:
        hook_context.printed.add("late evaluation")
        messages.say_unequal(
            f"{script_line()}: each rank evaluates its own share of the rows, because the loop began before"
            " model.eval() or torch.no_grad()\n  try  call model.eval() before the loop"
        )


def count_rows_once(hook_context: HookContext) -> None:
    """Have metrics that a library adds up over ranks (torchmetrics', ignite's) count complete rows once."""
    running = [True]

    def complete() -> bool:
        context = hook_context
        whole = context.keeps_batch or (context.batches.complete and context.evaluating())
        return bool(running and context.ownership.ours and not context.ownership.ranked and whole)

    def update(wrap_update: Any, metric: Any, function: Any) -> Any:
        inner = wrap_update(metric, function)

        @functools.wraps(inner)
        def noting(*args: Any, **kwargs: Any) -> None:
            metric.__dict__["fsdplaunch_complete"] = complete()
            inner(*args, **kwargs)

        return noting

    def sync(original: Any, metric: Any, *args: Any, **kwargs: Any) -> None:
        if not metric.__dict__.get("fsdplaunch_complete"):
            original(metric, *args, **kwargs)

    wrap_once_imported("torchmetrics.metric", "Metric._wrap_update", update)
    wrap_once_imported("torchmetrics.metric", "Metric.sync", sync)
    # So many processes have rows of their own, of which ignite's metrics exchange what they have counted.
    wrap_once_imported("ignite.distributed", "get_world_size", lambda size: 1 if complete() else int(size()))
    hook_context.undo.callback(running.clear)


_turning: list[bool] = []


def turn(original: Any, hook_context: HookContext, model: nn.Module, mode: bool = True) -> Any:
    """Stand for `Module.train`: what ranks have of their own, and may decide by, is aligned for evaluation."""
    if _turning:  # it calls itself for every module below
        return original(model, mode)
    turns = not mode and model.training and model in hook_context.models
    if turns and not hook_context.ownership.ranked and not hook_context.keeps_batch:
        check_all_ranks(f"{original_name(model)}.eval()")
        if dist.get_world_size() > 1:
            _align(model)
    _turning.append(True)
    try:
        return original(model, mode)
    finally:
        _turning.clear()
        if hook_context.streams.diverged:
            hook_context.streams.evaluate(now=not any(each.training for each in list(hook_context.models)))


def step_by_mean(
    original: Any, hook_context: HookContext, scheduler: Any, metrics: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stand for `ReduceLROnPlateau.step`, which decides by the mean of all ranks. Collective."""
    apart = hook_context.size > 1 and hook_context.ownership.ours and not hook_context.keeps_batch
    if apart and trains_shards(scheduler.optimizer):
        check_all_ranks("ReduceLROnPlateau.step", "call scheduler.step(metric) on all ranks")
        metrics = float(metrics)
        ranks: list[float] = from_all(metrics)
        other = next((each for each in ranks if str(each) != str(ranks[0])), None)
        if other is not None:
            hook_context.say_once(
                f"{script_line()}: ReduceLROnPlateau gets {ranks[0]:.6g} on rank 0 and {other:.6g} on another,"
                " each from its own rows: the mean over all ranks is used",
                key="plateau",
            )
            metrics = float(torch.tensor(ranks, dtype=torch.float64).mean())
    return original(scheduler, metrics, *args, **kwargs)


def normalise(original: Any, hook_context: HookContext, norm: Any, given: torch.Tensor) -> torch.Tensor:
    """Stand for `SyncBatchNorm.forward`, which uses the rows of all workers on the CPU too."""
    if given.device.type != "cpu" or not hook_context.ownership.ours:
        return original(norm, given)  # type: ignore[no-any-return]
    if not norm.training or hook_context.keeps_batch or not hook_context.models:
        return BatchNorm.forward(norm, given)
    from fsdplaunch.runtime.auto.batch.in_pass import GlobalBatchNorm
    from fsdplaunch.runtime.auto.batch.rank_rows import RankRows

    with GlobalBatchNorm(RankRows(dist.get_world_size(), dist.get_rank(), dist.get_world_size())):
        return BatchNorm.forward(norm, given)


@torch.no_grad()
def _align(model: nn.Module) -> None:
    """Average BatchNorm's statistics over all workers, and give all of them rank 0's other buffers. Collective.

    Buffers that are not saved with the model are derived from its configuration, and left alone.
    """
    for module in model.modules():
        for name, buffer in own_buffers(module):
            if is_persistent(module, name) and isinstance(module, BatchNorm) and buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(dist.get_world_size())
            elif is_persistent(module, name):
                dist.broadcast(buffer, src=0)
