"""Every rank reads its own part of the data, all parts together are the data, and epochs differ."""

from collections.abc import Iterator
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


def two_epochs(options: dict[str, Any], count: int) -> tuple[list[list[int]], list[list[int]], bool]:
    torch.manual_seed(dist.get_rank())
    loader = DataLoader(Numbers(count), **options)
    prepared = fsdplaunch.prepare(loader)
    return read(prepared), read(prepared), prepared is loader


def test_ordered_loader_gives_each_rank_every_other_item(two_ranks: RankPool) -> None:
    (first, again, same), (other, _, _) = two_ranks.run(two_epochs, {"batch_size": 2}, 8)
    assert first == again == [[0, 2], [4, 6]]
    assert other == [[1, 3], [5, 7]]
    assert same


def test_shuffling_loader_covers_the_data_and_draws_each_epoch_anew(two_ranks: RankPool) -> None:
    results = two_ranks.run(two_epochs, {"batch_size": 4, "shuffle": True}, 16)
    for epoch in (0, 1):
        assert sorted(flat(results[0][epoch]) + flat(results[1][epoch])) == list(range(16))
    assert results[0][0] != results[0][1]


def test_shuffling_follows_the_generator_the_script_gave(two_ranks: RankPool) -> None:
    one = two_ranks.run(seeded, 7)[0]
    assert one == two_ranks.run(seeded, 7)[0]
    assert one != two_ranks.run(seeded, 8)[0]


def seeded(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(Numbers(32), batch_size=4, shuffle=True, generator=generator)
    return flat(read(fsdplaunch.prepare(loader)))


def test_uneven_data_gives_all_ranks_the_same_number_of_batches(two_ranks: RankPool) -> None:
    results = two_ranks.run(two_epochs, {"batch_size": 2}, 7)
    assert [len(batches) for batches, _, _ in results] == [2, 2]
    assert set(flat(results[0][0]) + flat(results[1][0])) == set(range(7))


def test_drop_last_drops_on_all_ranks(two_ranks: RankPool) -> None:
    results = two_ranks.run(two_epochs, {"batch_size": 2, "drop_last": True}, 7)
    assert [batches for batches, _, _ in results] == [[[0, 2]], [[1, 3]]]


def with_workers() -> tuple[list[list[int]], list[list[int]]]:
    loader = DataLoader(Numbers(16), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)
    prepared = fsdplaunch.prepare(loader)
    return read(prepared), read(prepared)


def test_persistent_workers_see_the_next_epoch(two_ranks: RankPool) -> None:
    (one, two), (three, _) = two_ranks.run(with_workers)
    assert sorted(flat(one) + flat(three)) == list(range(16))
    assert one != two


def custom(kind: str) -> tuple[list[int], int]:
    torch.manual_seed(dist.get_rank())
    numbers = Numbers(12)
    loaders: dict[str, Any] = {
        "weighted": lambda: DataLoader(
            numbers, batch_size=2, sampler=WeightedRandomSampler([1.0] * 12, 12, False)
        ),
        "replacing": lambda: DataLoader(numbers, batch_size=2, sampler=RandomSampler(numbers, True, 12)),
        "batches": lambda: DataLoader(numbers, batch_sampler=Pairs(12)),
        "plain batches": lambda: DataLoader(numbers, batch_sampler=BatchSampler(RandomSampler(numbers), 2, False)),
    }
    prepared = fsdplaunch.prepare(loaders[kind]())
    return flat(read(prepared)), len(prepared)


@pytest.mark.parametrize("kind", ["weighted", "batches", "plain batches"])
def test_sampler_of_the_users_own_is_split_without_loss(two_ranks: RankPool, kind: str) -> None:
    (one, length), (two, _) = two_ranks.run(custom, kind)
    assert sorted(one + two) == list(range(12))
    assert length == 3


def test_drawing_with_replacement_gives_each_rank_half_the_draws(two_ranks: RankPool) -> None:
    assert [len(items) for items, _ in two_ranks.run(custom, "replacing")] == [6, 6]


def streamed(count: int, workers: int) -> list[int]:
    return flat(read(fsdplaunch.prepare(DataLoader(Stream(count), batch_size=2, num_workers=workers))))


def test_stream_is_read_in_turns_and_ends_for_all_ranks_at_once(two_ranks: RankPool) -> None:
    assert two_ranks.run(streamed, 9, 0) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_stream_in_a_worker_process_is_read_in_turns(two_ranks: RankPool) -> None:
    assert two_ranks.run(streamed, 8, 1) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def already_split() -> tuple[bool, list[int]]:
    numbers = Numbers(8)
    sampler = DistributedSampler(numbers, shuffle=False)
    loader = DataLoader(numbers, batch_size=2, sampler=sampler)
    prepared = fsdplaunch.prepare(fsdplaunch.prepare(loader))
    return prepared.sampler is sampler, flat(read(prepared))


def test_distributed_sampler_of_the_script_is_left_alone(two_ranks: RankPool) -> None:
    assert two_ranks.run(already_split) == [(True, [0, 2, 4, 6]), (True, [1, 3, 5, 7])]


def chosen_epoch() -> tuple[list[int], list[int]]:
    loader = fsdplaunch.prepare(DataLoader(Numbers(16), batch_size=4, shuffle=True))
    first = flat(read(loader))
    flat(read(loader))
    loader.sampler.set_epoch(0)
    return first, flat(read(loader))


def test_epoch_set_by_the_script_is_the_one_drawn(two_ranks: RankPool) -> None:
    first, again = two_ranks.run(chosen_epoch)[0]
    assert first == again
