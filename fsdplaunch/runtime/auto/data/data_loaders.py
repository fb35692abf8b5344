"""Divide data loaders: each worker gets its share of every batch, in the order the script's own sampler draws.

Needed because all workers run the same loop. Loaders that are read while the script evaluates stay complete on
every worker: what is computed from them, and decided by it, is then the same everywhere.
"""

import functools
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.early_lengths import EarlyLengths
from fsdplaunch.runtime.auto.data.fitted_samplers import fit
from fsdplaunch.runtime.auto.data.made_batches import read_made_batches
from fsdplaunch.runtime.auto.data.padded_rows import note_padding
from fsdplaunch.runtime.auto.data.same_data import tell_other_data
from fsdplaunch.runtime.auto.data.samplers import RankTurns, tell_undivided
from fsdplaunch.runtime.auto.rng.own_generators import OwnGenerators
from fsdplaunch.runtime.auto.rng.single_draws import drawing_items
from fsdplaunch.runtime.auto.rng.worker_draws import WorkerDraws
from fsdplaunch.runtime.data.data_loader import check_divisible, count_readers, is_split, set_attributes
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.data_loaders import iterator_class, iterator_methods, set_iterator_methods


@contextmanager
def dividing_loaders(hook_context: HookContext) -> Iterator[None]:
    """Divide a loader when it is first read or its length is."""
    loaders = _Loaders(hook_context)
    with (
        replaced(DataLoader, "__iter__", loaders.reading),
        replaced(DataLoader, "__len__", loaders.measuring),
        replaced(iterator_class(), "__init__", loaders.beginning),
    ):
        yield


class _Loaders:
    """The loaders of one worker's script."""

    def __init__(self, hook_context: HookContext) -> None:
        self.hook_context = hook_context
        self.fitted: weakref.WeakSet[Any] = weakref.WeakSet()
        self.compared: weakref.WeakSet[Any] = weakref.WeakSet()
        self.early = EarlyLengths()

    def _are_ours(self, loader: Any) -> bool:
        """Return whether a loader is to be divided, after dividing it if it is."""
        hook_context = self.hook_context
        if hook_context.size == 1:
            return False
        divides, split = hook_context.ownership.decided(), is_split(loader)
        if split and hook_context.ownership.ours and hook_context.data.size < hook_context.size:
            count_readers(loader, hook_context.data)
        if split or not divides or hook_context.data.size == 1:
            return False
        if loader not in self.fitted:
            self.fitted.add(loader)
            fit(loader, hook_context)
        return True

    def _compare_data(self, loader: Any) -> None:
        """Compare over ranks what a loader that is divided reads, the first time that it does."""
        if loader not in self.compared and not isinstance(loader.dataset, IterableDataset):
            self.compared.add(loader)
            tell_other_data(loader.dataset, self.hook_context)

    def _gives_batches(self, loader: Any) -> bool:
        """Return whether all ranks read what a loader gives, which makes no batches, to divide that."""
        trains = self.hook_context.keeps_batch and not self.hook_context.evaluating()
        return bool(trains and loader.batch_sampler is None)

    def reading(self, original: Any) -> Any:
        """Make a loader's `__iter__`."""

        def iterate(loader: Any) -> Any:
            if not self._are_ours(loader):
                self.hook_context.batches.complete = False
                return original(loader)
            _check_batch(loader, self.hook_context)
            self.hook_context.batches.complete = self.hook_context.evaluating()
            if self.hook_context.models and not self.hook_context.evaluating():
                self.hook_context.streams.diverge()  # before the loader's processes get their seeds
                self.early.compare(loader)
                self._compare_data(loader)
            if self._gives_batches(loader):
                return read_made_batches(loader, original, self.hook_context)
            if isinstance(loader.dataset, IterableDataset):
                return _read_stream(loader, original, self.hook_context)
            if not self.hook_context.keeps_batch or self.hook_context.evaluating():
                return original(loader)
            return _read_with_own_draws(loader, original, self.hook_context)

        return iterate

    def beginning(self, original: Any) -> Any:
        """Make an iterator's `__init__`: a subclass with an `__iter__` of its own begins one without `reading`."""

        def begin(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(loader, DataLoader):  # what stands for one in a library's own loader
                self.hook_context.batches.read_by = _all_rows(
                    f"a loader of {type(loader).__module__.partition('.')[0]}"
                )
            elif loader not in self.fitted and not is_split(loader):
                self.hook_context.batches.read_by = _all_rows(type(loader).__name__)
            original(iterator, loader, *args, **kwargs)

        return begin

    def measuring(self, original: Any) -> Any:
        """Make a loader's `__len__`."""

        def measure(loader: Any) -> int:
            ours, length = self._are_ours(loader), int(original(loader))
            if self.hook_context.size > 1 and self.hook_context.ownership.ours is None:
                self.early.note(loader, length)
            if not ours or not isinstance(loader.dataset, IterableDataset):
                return length
            return (
                length
                if self.hook_context.keeps_batch or _is_complete(self.hook_context)
                else math.ceil(length / self.hook_context.data.size)
            )

        return measure


def _all_rows(kind: str) -> str:
    return f"{kind}, whose __iter__ is not DataLoader's, gives each all of them"


def _is_complete(hook_context: HookContext) -> bool:
    return bool(hook_context.models) and hook_context.evaluating()


def _check_batch(loader: Any, hook_context: HookContext) -> None:
    """Refuse a training batch that the workers cannot divide as configured; print once how large batches are.

    Raises:
        ShardingError: They cannot.
    """
    size = loader.batch_size
    if size is None or not hook_context.models or hook_context.evaluating():
        return
    if hook_context.keeps_batch and size > 1:
        check_divisible(size, hook_context.data.size, script_line())
        _tell_last_batch(loader, size, hook_context)
    if "batch" not in hook_context.printed and (size > 1 or not hook_context.keeps_batch):
        hook_context.printed.add("batch")
        each, all_ = (
            (size // hook_context.data.size, size)
            if hook_context.keeps_batch
            else (size, size * hook_context.data.size)
        )
        messages.say(f"batches of {each} on each of {hook_context.data.size} ranks, {all_} together")


def _tell_last_batch(loader: Any, size: int, hook_context: HookContext) -> None:
    """Print before the first step that an epoch's last batch cannot be divided, where its items can be counted."""
    items = loader.sampler
    if (
        not loader.drop_last
        and size > 1
        and type(items).__module__.startswith("torch.")
        and hasattr(items, "__len__")
    ):
        tell_undivided(len(items) % size, hook_context)


def _read_with_own_draws(loader: Any, iterate: Any, hook_context: HookContext) -> Any:
    """Begin to read a dataset whose items, where they draw random numbers, must not draw the same on all ranks."""
    streams, kept = hook_context.streams, loader.worker_init_fn
    draws = WorkerDraws(kept, loader.collate_fn) if loader.num_workers else None
    own = OwnGenerators(loader.dataset, loader.collate_fn, order=_drawing_order(loader))
    set_attributes(loader, worker_init_fn=draws or kept)
    try:
        with streams.seeding():
            iterator = iterate(loader)
    finally:
        set_attributes(loader, worker_init_fn=kept)
    next_data, reset = iterator_methods(iterator)
    collates = loader.collate_fn is not default_collate

    def next_with_own_draws(iterator: Any = iterator) -> Any:
        hook_context.batches.complete = False
        own_stream = streams.own() if draws is None else nullcontext()
        with own_stream, drawing_items(hook_context), hook_context.recorder.paused():
            batch = next_data(iterator)
            if collates:
                note_padding(batch, hook_context)
        hook_context.recorder.begin()
        if "own draws" not in hook_context.printed:
            seen = streams.own_drawn or own.drew() if draws is None else draws.seen()
            _tell_own_draws(hook_context, seen=seen)
        return batch

    set_iterator_methods(iterator, next_with_own_draws, functools.partial(reset, iterator))
    return iterator


def _drawing_order(loader: Any) -> list[Any]:
    return [getattr(each, "generator", None) for each in (loader, loader.sampler)]


def _tell_own_draws(hook_context: HookContext, *, seen: bool) -> None:
    if seen:
        hook_context.printed.add("own draws")
        messages.say_unequal(
            "items of the dataset are drawn at random: each rank draws its own, not what one process would"
        )


def _read_stream(loader: Any, iterate: Any, hook_context: HookContext) -> Any:
    """Begin to read an iterable dataset: ranks take turns at its items, batches are divided if they are to be."""
    if hook_context.evaluating():
        return iterate(loader)
    hook_context.batches.divided = True
    kept = {"dataset": loader.dataset, "batch_sampler": loader.batch_sampler}
    divides = loader.batch_sampler is not None and hook_context.keeps_batch
    rows = max(loader.batch_size // hook_context.data.size, 1) if divides else 1
    set_attributes(loader, dataset=RankTurns(loader.dataset, hook_context, rows))
    if divides:
        part = BatchSampler(loader.sampler, rows, loader.drop_last)
        hook_context.batches.note(rows)
        set_attributes(loader, batch_sampler=part)
    try:
        with hook_context.streams.shared():  # its workers' seeds: all ranks must read one stream in one order
            return iterate(loader)
    finally:
        set_attributes(loader, **kept)
