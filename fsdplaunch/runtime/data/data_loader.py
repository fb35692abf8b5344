"""Give each rank its own items of the data, in place, in the loader's order and batch size."""

import math
from collections.abc import Iterator
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

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import from_rank_0
from fsdplaunch.runtime.data.loader_state import keep_count
from fsdplaunch.runtime.rank import DataRanks
from fsdplaunch.runtime.torch_internals.data_loaders import draws_all_items


class EpochSampler(DistributedSampler[Any]):
    """A distributed sampler that begins the next epoch by itself; `set_epoch` still decides when it is called."""

    def __iter__(self) -> Iterator[Any]:
        """Yield this epoch's indices of this rank, and move on to the next epoch."""
        indices = super().__iter__()
        self.epoch += 1
        return indices


class SharedOrder(Sampler[Any]):
    """Every rank's items of an order that only rank 0 decides: for samplers of the user's own.

    Rank 0 draws the full epoch and sends it. Ranks take turns; the last round is filled up from the start, so
    that all ranks have the same number of items. Items are indices, or lists of them for batch samplers.
    """

    def __init__(self, inner: Any, ranks: DataRanks) -> None:
        self.inner = inner
        self.ranks = ranks
        self.drawn: list[Any] | None = None
        """The present epoch's order, on the rank that drew it."""
        self.given: list[Any] | None = None
        """The order of the epoch a run is resumed in."""

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's items of a new epoch."""
        items, self.given = self.given, None
        if items is None:
            items = list(from_rank_0(list(self.inner) if self.ranks.rank == 0 else None))
        self.drawn = items if self.ranks.rank == 0 else None
        if items:
            items = items + (items * math.ceil(self.ranks.size / len(items)))[: -len(items) % self.ranks.size]
        return iter(items[self.ranks.rank :: self.ranks.size])

    def __len__(self) -> int:
        """Return the number of this rank's items in one epoch."""
        return math.ceil(len(self.inner) / self.ranks.size)


class TakingTurns(IterableDataset[Any]):
    """Every rank's items of a stream: ranks take turns, and a last incomplete round is left out.

    All ranks then see the same number of items, and none waits in a collective for a rank that has run out.
    """

    def __init__(self, stream: Any, ranks: DataRanks) -> None:
        self.stream = stream
        self.ranks = ranks

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's items."""
        round_: list[Any] = []
        for item in self.stream:
            round_.append(item)
            if len(round_) == self.ranks.size:
                yield round_[self.ranks.rank]
                round_ = []

    def __getattr__(self, name: str) -> Any:
        """Return what else the stream offers."""
        if name.startswith("__") or name == "stream":
            raise AttributeError(name)
        return getattr(self.stream, name)


def shard_loader(loader: DataLoader[Any], ranks: DataRanks) -> DataLoader[Any]:
    """Make a loader give this rank its own items and count what it gives, and return it.

    The batch size stays and is each rank's own. A loader that shuffles or reads in order gets an `EpochSampler`,
    other samplers and batch samplers are split by `SharedOrder`, streams by `TakingTurns`. A loader that already
    has a distributed sampler, and a stream that already was split, stay as they are. One rank alone is treated
    like several: a run resumed on more or fewer ranks goes on in the same order.
    """
    keep_count(loader, ranks.size)
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
    sampler = _sampler(loader, ranks)
    set_attributes(loader, sampler=sampler)
    if batches is not None:
        set_attributes(loader, batch_sampler=BatchSampler(sampler, batches.batch_size, batches.drop_last))
    return loader


def count_readers(loader: DataLoader[Any], ranks: DataRanks) -> None:
    """Let a script's own distributed sampler, divided by all ranks, count those that read different data.

    Args:
        loader: With any sampler.
        ranks: This one among those; fewer than all where ranks split layers or sequences.
    """
    world = dist.get_world_size()
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas == world != ranks.size:
            sampler.num_replicas, sampler.rank = ranks.size, ranks.rank
            left = len(sampler.dataset) - (ranks.size - 1 if sampler.drop_last else 0)  # type: ignore[arg-type]
            sampler.num_samples = math.ceil(left / ranks.size)
            sampler.total_size = sampler.num_samples * ranks.size
            messages.say(f"{type(sampler).__name__}: {ranks.size} of {world} ranks read different data")


def check_divisible(size: int | None, ranks: int, line: str) -> None:
    """Refuse a training batch of which each rank is to have its part and cannot.

    Args:
        size: Of the loader's batches; None where it makes none.
        ranks: That divide them.
        line: Of the script, that reads or prepares them.

    Raises:
        ShardingError: They cannot.
    """
    if size is not None and size % ranks:
        msg = f"{line} reads batches of {size}, which {ranks} workers cannot divide evenly"
        raise ShardingError(msg, hint="change the batch size or the number of workers, or leave keep_global_batch")


def is_split(loader: DataLoader[Any]) -> bool:
    """Return whether a loader gives each rank its own items already, by this package's means or the script's."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    if any(_is_share(sampler) for sampler in (loader.sampler, inner, loader.batch_sampler)):
        return True
    split_elsewhere = getattr(loader.dataset, "_distributed", None) is not None  # datasets' split_dataset_by_node
    return isinstance(loader.dataset, TakingTurns) or split_elsewhere


def _is_share(sampler: Any) -> bool:
    """Return whether a sampler gives this rank's items; one made for a single replica gives all of them."""
    if isinstance(sampler, DistributedSampler) and not isinstance(sampler, EpochSampler):
        return sampler.num_replicas > 1 or dist.get_world_size() == 1
    return isinstance(sampler, EpochSampler | SharedOrder)


def _sampler(loader: DataLoader[Any], ranks: DataRanks) -> Sampler[Any]:
    sampler = loader.sampler
    plain_random = type(sampler) is RandomSampler and not sampler.replacement and draws_all_items(sampler)
    if type(sampler) is SequentialSampler or plain_random:
        return EpochSampler(
            loader.dataset,
            num_replicas=ranks.size,
            rank=ranks.rank,
            shuffle=plain_random,
            seed=_seed_of_rank_0(loader.generator),
            drop_last=loader.drop_last,
        )
    messages.say(f"{type(sampler).__name__}: rank 0 draws its order, ranks take turns")
    return SharedOrder(sampler, ranks)


def _seed_of_rank_0(generator: torch.Generator | None) -> int:
    """Return the seed of the script's own shuffling, the same on all ranks."""
    seed: int = from_rank_0(torch.initial_seed() if generator is None else generator.initial_seed())
    return seed % 2**63


def set_attributes(loader: DataLoader[Any], **attributes: Any) -> None:
    """Set what a loader guards against change; before its first iteration nothing has read it.

    Changed in place, not built anew: a subclass may have a constructor of its own, and other objects may hold it.
    """
    loader.__dict__.update(attributes)
