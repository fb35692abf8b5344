"""Copies of shards are known by what they were made from, and never taken for what they were before a change."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdplaunch.runtime.auto.state.rank0.copies import copied_from, named_copies, remembering_copies
from fsdplaunch.runtime.auto.state.rank0.position import Position
from fsdplaunch.runtime.auto.state.rank0.shard_names import identity

POSITION = Position()
SOURCE = '["model", 0, "weight"]'


@pytest.fixture
def weight(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    with remembering_copies(POSITION):
        yield nn.Parameter(distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]))
    dist.destroy_process_group()


def names(weight: Any) -> dict[int, str]:
    return {id(tensor): name for name, tensor in named_copies({identity(weight): SOURCE})}


def test_copies_that_rank_0_can_make_again(weight: Any) -> None:
    full = torch.arange(12.0).view(4, 3) + 1
    state = {"weight": weight.detach()}
    made = [
        (copy.deepcopy(state)["weight"], full),
        (state["weight"].cpu().clone(), full),
        (weight.detach().half(), full.half()),
        (copy.deepcopy({"state": state})["state"]["weight"].to(torch.float64), full.double()),
    ]
    for tensor, wanted in made:
        found = copied_from(tensor)
        assert found is not None
        assert torch.equal(found.again(full), wanted)
        assert found.again(full).dtype is wanted.dtype
    made[0][0].mul_(2)
    assert copied_from(made[0][0]) is None
    with torch.no_grad():
        weight.add_(1)
    assert [copied_from(tensor) for tensor, _ in made] == [None] * len(made)
    assert copied_from(weight.detach() * 1) is None
    uncounted = weight.data.clone()
    found = copied_from(uncounted)
    assert found is not None
    assert found.is_of(weight, uncounted)
    with torch.no_grad():
        weight.add_(1)
    assert not found.is_of(weight, uncounted)


def test_names_of_copies_tell_their_history(weight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    best, average, other = weight.detach().clone(), weight.detach().clone(), weight.detach().half()
    later = weight.data.clone()
    monkeypatch.setattr(POSITION, "passes", 1)
    assert len({*names(weight).values()}) == 2
    later = weight.data.clone()
    assert len({*names(weight).values()}) == 3
    assert (
        names(weight)[id(best)] == names(weight)[id(average)] not in {names(weight)[id(x)] for x in (other, later)}
    )
    monkeypatch.setattr(POSITION, "passes", 0)
    average.lerp_(weight.detach(), 0.5)
    once = names(weight)
    assert once[id(best)] != once[id(average)]
    further = weight.detach().clone().mul_(0.5)
    assert names(weight)[id(average)] != once[id(average)]  # which of the two it is cannot be told on other ranks
    del further
    assert names(weight) == once
    of_average = average.clone()
    average.mul_(0.5)
    assert copied_from(of_average) is None
    assert names(weight)[id(average)] not in once.values()


def test_state_that_begins_as_a_copy_in_a_step_keeps_no_gradient(weight: Any) -> None:
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = weight.detach() * 0 + 1
    optimizer.step()
    momentum = optimizer.state[weight]["momentum_buffer"]
    assert copied_from(momentum) is None
    saved = copied_from(copy.deepcopy(optimizer.state_dict())["state"][0]["momentum_buffer"])
    assert saved is not None
    assert identity(saved.source) == identity(momentum)
