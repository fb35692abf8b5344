"""Every rank's own plan, and the index rank 0 writes, are what torch's planner makes of the plans of all ranks."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdplaunch.checkpoint.safe_pickle.dcp_classes import read_records
from fsdplaunch.runtime.saving.sharded_plan import SharedPlan, UnknownLayoutError
from fsdplaunch.runtime.saving.write_sharded import data_file, write_index
from fsdplaunch.runtime.torch_internals.late_imports import StorageInfo, flatten_state_dict


@contextmanager
def one_of(rank: int, world: int) -> Iterator[None]:
    """Be one of so many ranks, that are not there."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def split(shape: tuple[int, ...], mesh: Any, placements: Any) -> DTensor:
    """A DTensor with this rank's shard, which may be empty."""
    local = torch.empty(shape)
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = list(local.chunk(mesh.size(dim), placement.dim))
            empty = local.narrow(placement.dim, 0, 0)
            parts += [empty] * (mesh.size(dim) - len(parts))
            local = parts[mesh.get_local_rank(dim)]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=torch.empty(shape).stride()
    )


def flat_mesh(rank: int, world: int) -> dict[str, Any]:
    """FSDP2: even and uneven rows, fewer rows than ranks, columns, buffers, optimizer state, values."""
    mesh = init_device_mesh("cpu", (world,))
    rows = [Shard(0)]
    state = {"step": torch.tensor(3.0), "exp_avg": split((5 * world + 1, 3), mesh, rows)}
    return {
        "model": {
            "mean": torch.zeros(7),
            "even": split((2 * world, 4), mesh, rows),
            "uneven": split((2 * world + 1,), mesh, rows),
            "few": split((2, 3, 1, 2), mesh, rows),
            "none": split((0, 3), mesh, rows),
            "columns": split((3, world), mesh, [Shard(1)]),
            "everywhere": split((9, 9), mesh, [Replicate()]),
            "count": torch.tensor(1),
        },
        "optimizer": {
            "state": {"even": state, "uneven": {"step": torch.tensor(2.0)}, "none": {}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["even", "uneven"], "t": torch.ones(())}],
        },
    }


def replicas(rank: int, world: int) -> dict[str, Any]:
    """HSDP: each shard on several ranks."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = [Replicate(), Shard(0)]
    found: dict[str, Any] = {f"layers.{number}": split((number + 1, 5), mesh, sharded) for number in range(7)}
    return found | {"two": split((4, 6), mesh, [Shard(1), Shard(0)]), "mean": torch.zeros(2), "word": "text"}


STATES = {"flat": flat_mesh, "replicas": replicas}


def as_plain(metadata: Any) -> Any:
    """All of an index in plain data."""

    def chunks(entry: Any) -> Any:
        listed = getattr(entry, "chunks", [])
        return repr(getattr(entry, "properties", None)), sorted((each.offsets, each.sizes) for each in listed)

    entries = {name: chunks(entry) for name, entry in metadata.state_dict_metadata.items()}
    storage = {
        (key.fqn, key.offset): (info.relative_path, info.offset, info.length, sorted(vars(info)))
        for key, info in metadata.storage_data.items()
    }
    return entries, storage, metadata.planner_data


@pytest.mark.parametrize("world", [2, 4, 6, 8])
@pytest.mark.parametrize("kind", STATES)
def test_plans_and_index_say_what_those_of_torch_say(kind, world, tmp_path):
    planners, local, shared = [DefaultSavePlanner() for _ in range(world)], [], []
    for rank, planner in enumerate(planners):
        with one_of(rank, world):
            state = STATES[kind](rank, world)
            planner.set_up_planner(state, is_coordinator=rank == 0)
            local.append(planner.create_local_plan())
            shared.append(SharedPlan(*flatten_state_dict(state), world))
    assert len({each.digest for each in shared}) == 1
    own_plans = [each.own_plan(local[rank], rank) for rank, each in enumerate(shared)]
    plans, metadata = planners[0].create_global_plan(local)
    keys = [
        sorted(repr((item.index.fqn, item.index.offset)) for plan in each for item in plan.items)
        for each in (own_plans, plans)
    ]
    assert keys[0] == keys[1]
    counts = [len(plan.items) for plan in own_plans]  # copies are shared out evenly
    assert kind != "replicas" or max(counts) - min(counts) <= 2
    assert [plan.planner_data for plan in own_plans] == [plan.planner_data for plan in plans]
    # Invented places: some small, some beyond 4 GB.
    places = [[(n * 10 ** (1 + n % 9), 300 + 7**n % 10**11) for n in range(count)] for count in counts]
    metadata.storage_data = {
        item.index: StorageInfo(data_file(rank), *place)
        for rank, plan in enumerate(own_plans)
        for item, place in zip(plan.items, places[rank], strict=True)
    }
    for each in shared[:: world - 1]:  # the first rank writes, any other could
        with (tmp_path / ".metadata").open("wb") as file:
            write_index(file, each, places.__getitem__, StorageMeta(checkpoint_id=tmp_path, save_id="one"))
        made = pickle.loads((tmp_path / ".metadata").read_bytes())
        assert as_plain(made) == as_plain(pickle.loads(pickle.dumps(metadata)))
    found = read_records((tmp_path / ".metadata").read_bytes(), "it").places
    assert sorted(map(tuple, found.values())) == sorted(
        (info.relative_path, info.offset, info.length) for info in metadata.storage_data.values()
    )


def test_what_not_every_rank_can_know_is_refused():
    with one_of(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
        two_axes = init_device_mesh("cpu", (2, 2))
        both = DTensor.from_local(torch.ones(1, 2), two_axes, [Shard(0), Shard(0)], run_check=False)
        for value in (partial, both):
            with pytest.raises(UnknownLayoutError):
                SharedPlan({"w": value}, {"w": ("w",)}, 4)
        with pytest.raises(UnknownLayoutError, match="mesh does not hold all ranks"):
            SharedPlan({"w": split((8,), mesh, [Shard(0)])}, {"w": ("w",)}, 8)


def test_ranks_that_differ_have_other_digests():
    with one_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        plain = {"w": split((4, 2), mesh, [Shard(0)]), "b": torch.ones(2), "n": 3}
        variants = [
            plain,
            plain | {"w": split((4, 2), mesh, [Shard(1)])},
            plain | {"w": split((5, 2), mesh, [Shard(0)])},
            plain | {"b": torch.ones(2, dtype=torch.bfloat16)},
            plain | {"more": 1},
            {"b": plain["b"], "w": plain["w"], "n": 3},
            plain | {"n": torch.ones(())},
        ]
        digests = {SharedPlan(each, {name: (name,) for name in each}, 2).digest for each in variants}
        same = SharedPlan(dict(plain), {name: (name,) for name in plain}, 2).digest
        assert len(digests) == len(variants)
        assert same in digests
