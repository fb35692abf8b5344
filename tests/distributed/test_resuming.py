"""A run that is stopped and resumed, on other ranks or in another layout, gives the losses of one that is not."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import fsdplaunch
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpoints import FORMS, go_on, largest_difference, save_half_way
from tests.distributed.tiny import adamw, batch, build, loss_of, mean_over_ranks, plugin

GLOBAL_BATCH, HALF = 8, 10
ITEMS = 48  # six batches: ten steps end in the second epoch, twenty in the fourth


class Sentences(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.rows = torch.cat([batch(number) for number in range(ITEMS // 8)])

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class SentenceStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(Sentences().rows)


class OwnOrder(Sampler[int]):
    """An order of the user's own, drawn anew for each epoch from the global generator."""

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Any:
        return iter(torch.randperm(ITEMS).tolist())


def make_loader(kind: str) -> Any:
    size = GLOBAL_BATCH // dist.get_world_size()
    if kind == "stream":
        return DataLoader(SentenceStream(), batch_size=size)
    if kind == "own order":
        return DataLoader(Sentences(), batch_size=size, sampler=OwnOrder())
    workers = {"num_workers": 1, "persistent_workers": True} if kind == "workers" else {}
    return DataLoader(Sentences(), batch_size=size, shuffle=True, **workers)


def train(folder: str, kind: str, first: int, steps: int) -> list[float]:
    """The mean loss of each step, from the start or from what was saved; saved after the tenth step."""
    torch.manual_seed(3)
    model, loader = build(1 if first else 0), make_loader(kind)
    chosen = plugin(fsdp_version=2)
    model, optimizer, loader = fsdplaunch.prepare(model, adamw(model.parameters()), loader, plugin=chosen)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if first:
        assert fsdplaunch.load_checkpoint(folder, **state)["step"] == first
    losses, batches = [], iter(loader)
    for step in range(first + 1, first + steps + 1):
        ids = next(batches, None)
        if ids is None:
            batches = iter(loader)
            ids = next(batches)
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        if step == HALF and folder:
            fsdplaunch.save_checkpoint(folder, **state, step=step)
    return losses


@pytest.fixture(scope="module")
def whole(
    two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[str, list[float]]]:
    """Return a function that trains twenty steps over two ranks, once for each order, and saves after ten."""

    @cache
    def run(kind: str) -> tuple[str, list[float]]:
        folder = str(tmp_path_factory.mktemp("whole"))
        return folder, two_ranks.run(train, folder, kind, 0, 2 * HALF)[0]

    return run


@pytest.mark.parametrize("kind", ["workers", "own order", "stream"])
def test_ten_steps_and_ten_resumed_are_twenty(two_ranks: RankPool, whole: Any, kind: str) -> None:
    folder, losses = whole(kind)
    assert largest_difference(losses[HALF:], two_ranks.run(train, folder, kind, HALF, HALF)[0]) < 1e-6


def test_a_save_changes_nothing_of_the_run(two_ranks: RankPool, whole: Any) -> None:
    assert two_ranks.run(train, "", "shuffled", 0, 2 * HALF)[0] == whole("shuffled")[1]


@pytest.mark.parametrize(("after", "kind"), [(4, "own order"), (4, "stream"), (1, "shuffled")])
def test_resumed_on_other_ranks_takes_the_same_global_batches(
    one_rank: RankPool, four_ranks: RankPool, whole: Any, after: int, kind: str
) -> None:
    folder, losses = whole(kind)
    resumed = {1: one_rank, 4: four_ranks}[after].run(train, folder, kind, HALF, HALF)[0]
    # An order of the user's own is drawn from rank 0's generator, which goes on where it was.
    assert largest_difference(losses[HALF:], resumed) < 2e-5


# Saved in one layout, loaded in another, with the optimizer


HYBRID = {"sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "2 hybrid": {"fsdp_version": 2, **HYBRID},
    "1 hybrid": {"fsdp_version": 1, **HYBRID, "state_dict_type": "SHARDED_STATE_DICT"},
    "2 one unit": {"fsdp_version": 2, "auto_wrap_policy": "NO_WRAP"},
    "2 many units": {"fsdp_version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 100},
    **{name: FORMS[name] for name in ("2 sharded", "2 full", "1 sharded", "1 full", "1 flat sharded")},
}


@pytest.mark.parametrize(
    ("before", "written", "after", "read"),
    [
        (2, "1 flat sharded", 4, "2 many units"),
        (2, "2 many units", 4, "1 hybrid"),
        (2, "2 full", 4, "1 full"),
        (2, "1 sharded", 4, "2 one unit"),
        (4, "2 hybrid", 2, "2 sharded"),
    ],
)
def test_layout_may_change_between_two_and_four_ranks(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, before: int, written: str, after: int, read: str
) -> None:
    pools = {2: two_ranks, 4: four_ranks}
    kept_on, _ = pools[before].run(save_half_way, str(tmp_path), LAYOUTS[written], {})[0]
    resumed, _, _ = pools[after].run(go_on, str(tmp_path), LAYOUTS[read], {})[0]
    assert largest_difference(kept_on, resumed) < 1e-5


def stepped(dtype: torch.dtype, fields: dict[str, Any]) -> tuple[nn.Module, Any]:
    model = build(0).to(dtype)
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.125)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def converted(folder: str, written: torch.dtype, read: torch.dtype, fields: dict[str, Any]) -> set[str]:
    """Save in one format and load into the other; the formats of weights and first moments afterwards."""
    model, optimizer = stepped(written, fields)
    fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer)
    other, its_optimizer = stepped(read, fields)
    loaded = [(param, its_optimizer.state[param]["exp_avg"]) for param in other.parameters()]
    with torch.no_grad():
        for tensor in (each for pair in loaded for each in pair):
            tensor.zero_()
    fsdplaunch.load_checkpoint(folder, model=other, optimizer=its_optimizer)
    formats = set()
    for param, moment in zip(model.parameters(), loaded, strict=True):
        for right, got in zip((param, optimizer.state[param]["exp_avg"]), moment, strict=True):
            formats.add(str(got.dtype))
            whole_ones = (got.full_tensor().float(), right.full_tensor().float())
            torch.testing.assert_close(*whole_ones, rtol=0.005, atol=1e-4)
    return formats


@pytest.mark.parametrize(
    ("written", "read", "form"),
    [(torch.float32, torch.bfloat16, "2 sharded"), (torch.bfloat16, torch.float32, "2 full")],
    ids=["down", "up"],
)
def test_number_format_may_change(
    two_ranks: RankPool, tmp_path: Path, written: torch.dtype, read: torch.dtype, form: str
) -> None:
    assert two_ranks.run(converted, str(tmp_path), written, read, FORMS[form]) == [{str(read)}] * 2
