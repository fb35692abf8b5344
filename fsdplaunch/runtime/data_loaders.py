"""Data loaders: each rank's own items, in place, and how to go on after a restart on any number of ranks.

What counts are the batches the script has been given; workers of the loader may have drawn more in advance.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from fsdplaunch.errors import CheckpointError, ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import from_all, from_rank_0
from fsdplaunch.runtime.rank import DataRanks
from fsdplaunch.runtime.torch_internals.modules import draws_all_items

_READING = "_fsdplaunch_reading"
Position = dict[str, Any]


@dataclass
class LoaderPass:
    """The present pass over one loader, of which so many ranks read different batches."""

    readers: int
    batches: int = 0  # those the script has been given in this pass, with those skipped at its start
    is_over: bool = True  # there was no further one, or no pass has begun
    epoch: int = 0  # the sampler's number of this pass
    skip: int = 0  # batches that the next pass leaves out at its start
    skipped: int = 0  # those that this pass left out
    goes_on: bool = False  # the next pass is the rest of one that had begun when the run was saved


def _begin_pass(kind: Any, loader: Any) -> Iterator[Any]:
    """Stand for `kind.__iter__`, at once and not at the first batch: workers start here, and seeds are drawn."""
    reading: LoaderPass = loader.__dict__[_READING]
    reading.epoch = getattr(_innermost_sampler(loader), "epoch", 0)
    reading.skipped, reading.skip = reading.skip, 0
    reading.batches, reading.is_over = reading.skipped, False
    before = _random_states(loader) if reading.goes_on else ()
    batches = kind.__iter__(loader)
    for generator, state in before:  # the pass had drawn its seed when it began
        generator.set_state(state)
    reading.goes_on = False
    if isinstance(loader.dataset, IterableDataset):
        for _ in itertools.islice(batches, reading.skipped):  # a stream has to be read to get there
            pass

    def counted() -> Iterator[Any]:
        for number, batch in enumerate(batches, reading.skipped + 1):
            reading.batches = number
            yield batch
        reading.is_over = True

    return counted()


def position_of(loader: Any) -> Position:
    """Return how far all ranks have read a prepared loader; every rank calls this."""
    reading, sampler = _reading(loader), _innermost_sampler(loader)
    at_end = not isinstance(loader.dataset, IterableDataset) and reading.batches >= len(loader)
    within = not reading.is_over and not at_end
    position: Position = {
        "batches": from_all(reading.batches if within else 0),
        "items_per_batch": _items_per_batch(loader),
        "readers": reading.readers,
        "epoch": reading.epoch if within else getattr(sampler, "epoch", 0),
        "seed": getattr(sampler, "seed", None),
        "within": within,
        "generators": [state for _, state in _random_states(loader)[1:]],
    }
    drawn = getattr(sampler, "drawn", None)
    if within and drawn is not None:
        all_numbers = all(type(item) is int for item in drawn)
        position["drawn"] = torch.tensor(drawn) if all_numbers else drawn
    return position


def resume_at(loader: Any, position: Position) -> None:
    """Let the next pass over a prepared loader begin at a position."""
    reading, counts = _reading(loader), position["batches"]
    then = position["items_per_batch"], position["readers"]
    now = _items_per_batch(loader), reading.readers
    if len(counts) == dist.get_world_size() and then == now:
        reading.skip = counts[dist.get_rank()]
    else:
        reading.skip = _converted(counts, prod(then), prod(now))
    sampler = _innermost_sampler(loader)
    for name in ("epoch", "seed"):
        if hasattr(sampler, name) and position.get(name) is not None:
            setattr(sampler, name, position[name])
    reading.goes_on = position["within"]
    for (generator, _), state in zip(_random_states(loader)[1:], position["generators"], strict=False):
        generator.set_state(state)
    drawn = position.get("drawn")
    if drawn is not None and hasattr(sampler, "drawn"):
        sampler.given = drawn.tolist() if isinstance(drawn, torch.Tensor) else drawn
    if isinstance(loader.dataset, IterableDataset):
        return
    place = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    if not isinstance(getattr(loader, place), SkippingSampler):
        loader.__dict__[place] = SkippingSampler(getattr(loader, place), reading)


def _converted(counts: list[int], round_then: int, round_now: int) -> int:
    """Return the batches for each rank to skip, of what ranks had read in rounds of so many items together."""
    if len(set(counts)) > 1:
        msg = f"the ranks had read {min(counts)} to {max(counts)} batches: other ranks cannot resume from there"
        raise CheckpointError(msg, hint=f"resume on {len(counts)} ranks with the same batch size")
    read = counts[0] * round_then
    again = read % round_now
    if again:
        messages.say(f"{read} items had been read, not a multiple of {round_now}: {again} of them are read again")
    return read // round_now


class LikeInner:
    """Has what else `inner` offers, in whose place it stands."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class SkippingSampler(LikeInner, Sampler[Any]):
    """A sampler without the first batches of the pass a run is resumed in."""

    def __init__(self, inner: Any, reading: LoaderPass) -> None:
        self.inner = inner
        self.reading = reading

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.inner), self.reading.skipped, None)

    def __len__(self) -> int:
        return len(self.inner)


def _reading(loader: Any) -> LoaderPass:
    reading = getattr(loader, "__dict__", {}).get(_READING)
    if not isinstance(reading, LoaderPass):
        msg = f"the position of a {type(loader).__name__} that was not prepared is not known"
        raise CheckpointError(msg, hint="give the loader that prepare returned")
    return reading


def _innermost_sampler(loader: Any) -> Any:
    outer = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    outer = outer.inner if isinstance(outer, SkippingSampler) else outer
    return outer.sampler if isinstance(outer, BatchSampler) else outer


def _random_states(loader: Any) -> list[tuple[torch.Generator, torch.Tensor]]:
    """Return the generators a pass draws from, with their states: torch's, then the loader's and sampler's own."""
    sampler = _innermost_sampler(loader)
    own = [loader.generator, getattr(getattr(sampler, "inner", sampler), "generator", None)]
    found = {id(generator): generator for generator in own if isinstance(generator, torch.Generator)}
    return [(each, each.get_state()) for each in (torch.default_generator, *found.values())]


def _items_per_batch(loader: Any) -> int:
    """Return how much of what the ranks take turns at makes one batch: items, or batches of the script's own."""
    outer = loader.batch_sampler
    outer = outer.inner if isinstance(outer, SkippingSampler) else outer
    return int(outer.batch_size) if type(outer) is BatchSampler else 1


class EpochSampler(DistributedSampler[Any]):
    """A distributed sampler that begins the next epoch by itself; `set_epoch` still decides when it is called."""

    def __iter__(self) -> Iterator[Any]:
        indices = super().__iter__()
        self.epoch += 1
        return indices


class SharedOrder(Sampler[Any]):
    """Every rank's items of an order that only rank 0 draws: indices, or lists of them for batch samplers.

    Ranks take turns; the last round is filled up from the start, so that all have the same number of items.
    """

    def __init__(self, inner: Any, ranks: DataRanks) -> None:
        self.inner = inner
        self.ranks = ranks
        self.drawn: list[Any] | None = None  # the present epoch's order, on the rank that drew it
        self.given: list[Any] | None = None  # the order of the epoch a run is resumed in

    def __iter__(self) -> Iterator[Any]:
        items, self.given = self.given, None
        if items is None:
            items = list(from_rank_0(list(self.inner) if self.ranks.rank == 0 else None))
        self.drawn = items if self.ranks.rank == 0 else None
        if items:
            items = items + (items * math.ceil(self.ranks.size / len(items)))[: -len(items) % self.ranks.size]
        return iter(items[self.ranks.rank :: self.ranks.size])

    def __len__(self) -> int:
        return math.ceil(len(self.inner) / self.ranks.size)


class TakingTurns(LikeInner, IterableDataset[Any]):
    """Every rank's items of a stream, in turns, without a last incomplete round: none waits for another."""

    def __init__(self, inner: Any, ranks: DataRanks) -> None:
        self.inner = inner
        self.ranks = ranks

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self.inner)
        while len(round_ := list(itertools.islice(stream, self.ranks.size))) == self.ranks.size:
            yield round_[self.ranks.rank]


def shard_loader(loader: DataLoader[Any], ranks: DataRanks) -> DataLoader[Any]:
    """Make a loader give this rank its own items and count what it gives, and return it.

    The batch size stays and is each rank's own. A loader that already has a distributed sampler, and a stream
    that already was split, stay as they are. One rank alone is treated like several: a run resumed on more or
    fewer ranks goes on in the same order.
    """
    if _READING not in loader.__dict__:
        loader.__dict__[_READING] = LoaderPass(ranks.size)
        kind = type(loader)
        own = {"__module__": kind.__module__, "__iter__": lambda self: _begin_pass(kind, self)}
        loader.__class__ = type(kind.__name__, (kind,), own)
    if is_split(loader):
        count_readers(loader, ranks)
        return loader
    if isinstance(loader.dataset, IterableDataset):
        set_attributes(loader, dataset=TakingTurns(loader.dataset, ranks))
        return loader
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        messages.say(f"{type(batches).__name__}: rank 0 draws its batches, ranks take turns")
        set_attributes(loader, batch_sampler=SharedOrder(batches, ranks))
        return loader
    sampler = _split_sampler(loader, ranks)
    set_attributes(loader, sampler=sampler)
    if batches is not None:
        set_attributes(loader, batch_sampler=BatchSampler(sampler, batches.batch_size, batches.drop_last))
    return loader


def count_readers(loader: DataLoader[Any], ranks: DataRanks) -> None:
    """Let a script's own distributed sampler count those ranks that read different data."""
    world = dist.get_world_size()
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas == world != ranks.size:
            sampler.num_replicas, sampler.rank = ranks.size, ranks.rank
            left = len(sampler.dataset) - (ranks.size - 1 if sampler.drop_last else 0)  # type: ignore[arg-type]
            sampler.num_samples = math.ceil(left / ranks.size)
            sampler.total_size = sampler.num_samples * ranks.size
            messages.say(f"{type(sampler).__name__}: {ranks.size} of {world} ranks read different data")


def check_divisible(size: int | None, ranks: int, line: str) -> None:
    """Refuse a training batch, at a line of the script, of which each rank is to have its part and cannot."""
    if size is not None and size % ranks:
        msg = f"{line} reads batches of {size}, which {ranks} workers cannot divide evenly"
        raise ShardingError(msg, hint="change the batch size or the number of workers, or leave keep_global_batch")


def is_split(loader: DataLoader[Any]) -> bool:
    """Return whether a loader gives each rank its own items already, by this package's means or the script's."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    for sampler in (loader.sampler, inner, loader.batch_sampler):
        if isinstance(sampler, EpochSampler | SharedOrder):
            return True
        if isinstance(sampler, DistributedSampler) and (sampler.num_replicas > 1 or dist.get_world_size() == 1):
            return True  # one made for a single replica gives all items
    split_elsewhere = getattr(loader.dataset, "_distributed", None) is not None  # datasets' split_dataset_by_node
    return isinstance(loader.dataset, TakingTurns) or split_elsewhere


def _split_sampler(loader: DataLoader[Any], ranks: DataRanks) -> Sampler[Any]:
    # A loader that was given its batches has a sampler of its own beside theirs, which it never asks.
    outer: Any = loader if loader.batch_sampler is None else loader.batch_sampler
    sampler = outer.sampler
    plain_random = type(sampler) is RandomSampler and not sampler.replacement and draws_all_items(sampler)
    if type(sampler) is SequentialSampler or plain_random:
        own = loader.generator or getattr(sampler, "generator", None)
        seed: int = from_rank_0(torch.initial_seed() if own is None else own.initial_seed())
        return EpochSampler(
            loader.dataset,
            num_replicas=ranks.size,
            rank=ranks.rank,
            shuffle=plain_random,
            seed=seed % 2**63,
            drop_last=outer.drop_last,
        )
    messages.say(f"{type(sampler).__name__}: rank 0 draws its order, ranks take turns")
    return SharedOrder(sampler, ranks)


def set_attributes(loader: DataLoader[Any], **attributes: Any) -> None:
    """Set what a loader guards against change; before its first iteration nothing has read it.

    Changed in place, not built anew: a subclass may have a constructor of its own, and other objects may hold it.
    """
    loader.__dict__.update(attributes)
