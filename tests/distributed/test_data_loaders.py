"""Every rank reads its own part of the data, all parts together are the data, and epochs differ."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

import fsdplaunch
from tests.distributed.pool import RankPool


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Pairs(Sampler[list[int]]):
    """Batches of a user's own: neighbours, in an order drawn anew each time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count // 2

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * i, 2 * i + 1] for i in torch.randperm(self.count // 2).tolist()])


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [item for batch in batches for item in batch]


NUMBERS = Numbers(12)
LOADERS: dict[str, Callable[[], Any]] = {
    "ordered": lambda: DataLoader(Numbers(8), batch_size=2),
    "uneven": lambda: DataLoader(Numbers(7), batch_size=2),
    "uneven, dropped": lambda: DataLoader(Numbers(7), batch_size=2, drop_last=True),
    "stream": lambda: DataLoader(Stream(9), batch_size=2),
    "stream in a worker": lambda: DataLoader(Stream(8), batch_size=2, num_workers=1),
    "divided by the script": lambda: DataLoader(
        Numbers(8), batch_size=2, sampler=DistributedSampler(Numbers(8), shuffle=False)
    ),
    "shuffled": lambda: DataLoader(NUMBERS, batch_size=2, shuffle=True),
    "persistent workers": lambda: DataLoader(
        NUMBERS, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "weighted": lambda: DataLoader(
        NUMBERS, batch_size=2, sampler=WeightedRandomSampler([1.0] * 12, 12, replacement=False)
    ),
    "replacing": lambda: DataLoader(
        NUMBERS, batch_size=2, sampler=RandomSampler(NUMBERS, replacement=True, num_samples=12)
    ),
    "batches": lambda: DataLoader(NUMBERS, batch_sampler=Pairs(12)),
    "plain batches": lambda: DataLoader(
        NUMBERS, batch_sampler=BatchSampler(RandomSampler(NUMBERS), 2, drop_last=False)
    ),
}


def two_epochs(kind: str) -> tuple[list[list[int]], list[list[int]], bool]:
    """Both epochs, and whether `prepare` returned the loader itself, twice."""
    torch.manual_seed(dist.get_rank())
    loader = LOADERS[kind]()
    prepared = fsdplaunch.prepare(fsdplaunch.prepare(loader))
    return read(prepared), read(prepared), prepared is loader


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ordered", [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
        ("uneven", [[[0, 2], [4, 6]], [[1, 3], [5, 0]]]),
        ("uneven, dropped", [[[0, 2]], [[1, 3]]]),
        ("stream", [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),  # it ends for all ranks at once
        ("stream in a worker", [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
        ("divided by the script", [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
    ],
)
def test_each_rank_reads_its_turn_in_every_epoch(two_ranks: RankPool, kind: str, expected: Any) -> None:
    for (first, again, same), batches in zip(two_ranks.run(two_epochs, kind), expected, strict=True):
        assert first == again == batches
        assert same or "stream" in kind


@pytest.mark.parametrize("kind", ["shuffled", "persistent workers", "weighted", "batches", "plain batches"])
def test_random_order_covers_the_data_and_is_drawn_anew(two_ranks: RankPool, kind: str) -> None:
    results = two_ranks.run(two_epochs, kind)
    for epoch in (0, 1):
        assert sorted(flat(results[0][epoch]) + flat(results[1][epoch])) == list(range(12))
        assert [len(result[epoch]) for result in results] == [3, 3]
    assert results[0][0] != results[0][1]


def test_drawing_with_replacement_gives_each_rank_half_the_draws(two_ranks: RankPool) -> None:
    assert [len(flat(first)) for first, _, _ in two_ranks.run(two_epochs, "replacing")] == [6, 6]


def seeded(seed: int) -> tuple[list[int], list[int], list[int]]:
    """Two epochs of the script's generator, and the first again."""
    generator = torch.Generator().manual_seed(seed)
    loader = fsdplaunch.prepare(DataLoader(Numbers(32), batch_size=4, shuffle=True, generator=generator))
    epochs = flat(read(loader)), flat(read(loader))
    loader.sampler.set_epoch(0)
    return *epochs, flat(read(loader))


def test_shuffling_follows_the_generator_and_the_epoch_of_the_script(two_ranks: RankPool) -> None:
    first, second, again = two_ranks.run(seeded, 7)[0]
    assert first == again != second
    assert two_ranks.run(seeded, 7)[0] == (first, second, again)
    assert two_ranks.run(seeded, 8)[0][0] != first
