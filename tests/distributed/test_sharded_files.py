"""Sharded files, written without a gathered plan, hold what torch's own save writes, on real ranks."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import fsdplaunch
from fsdplaunch.runtime.saving import write_sharded
from fsdplaunch.runtime.saving.model_and_optimizer import model_to_save, optimizer_to_save
from tests.distributed.pool import RankPool
from tests.distributed.test_async_copies import go_on
from tests.distributed.tiny import plugin, words_of

FORMS: dict[str, dict[str, Any]] = {
    "2": {"fsdp_version": 2},
    "2 hybrid": {"fsdp_version": 2, "sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2},
    "1": {"fsdp_version": 1},
    "1 flat": {"fsdp_version": 1, "use_orig_params": False},
    "1 hybrid": {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2},
}


def states(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A model with uneven rows, fewer than ranks, buffers, a parameter without state; and its optimizer."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 1), nn.Linear(1, 1))
    model[3].weight.requires_grad_(not fields.get("use_orig_params", True))  # flat parameters take all or none
    chosen = plugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1, **fields)
    model, optimizer = fsdplaunch.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), plugin=chosen)
    go_on(model, optimizer)
    kind = "SHARDED_STATE_DICT"
    parts = (model_to_save(model, kind, 0), optimizer_to_save(model, optimizer, kind, 0))
    compare_with_torch(model, optimizer, [part.state for part in parts])
    return {part.name: part.state for part in parts}


def compare_with_torch(model: nn.Module, optimizer: Any, found: list[dict[str, Any]]) -> None:
    """Have what is saved be what torch's functions give: names and their order, tensors, groups."""
    params, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    own_state, own_groups = found[1]["optimizer"].values()
    assert list(found[0]["model"]) == list(params)
    assert list(own_state) == list(state["state"])
    assert own_groups == state["param_groups"]
    for name, values in state["state"].items():
        assert list(values) == list(own_state[name])
        assert all(torch.equal(shard(own_state[name][key]), shard(value)) for key, value in values.items())


def shard(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.distcp")}


def contents(folder: Path) -> Any:
    """What the index says, and the bytes of each item, wherever it stands."""
    found = pickle.loads((folder / ".metadata").read_bytes())
    written = files(folder)
    items = {
        (key.fqn, key.offset): written[info.relative_path][info.offset :][: info.length]
        for key, info in found.storage_data.items()
    }
    for entry in found.state_dict_metadata.values():
        if hasattr(entry, "chunks"):
            entry.chunks = sorted(entry.chunks, key=repr)
    return found.state_dict_metadata, items, found.planner_data, getattr(found, "version", None)


def save_both(folder: str, fields: dict[str, Any]) -> list[tuple[bool, bool]]:
    """Whether each state was planned alone, and what is written is what torch writes."""
    planned, answers = [], []
    plan_alone = write_sharded._plan_alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_sharded, "_plan_alone", lambda *args: planned.append(plan_alone(*args)) or planned[-1])
        for name, state in states(fields).items():
            own, theirs = Path(folder) / "own" / name, Path(folder) / "theirs" / name
            write_sharded.write_sharded(state, own, None)
            dcp.save(state, checkpoint_id=theirs)
            dist.barrier()
            answers.append((planned[-1] is not None, contents(own) == contents(theirs)))
    return answers


@pytest.mark.parametrize(
    ("ranks", "form"),
    [(2, "1"), (4, "2"), (4, "1 flat"), (4, "2 hybrid"), (4, "1 hybrid")],
    indirect=["ranks"],
)
def test_what_is_written_is_what_torch_writes(ranks: RankPool, tmp_path: Path, form: str) -> None:
    for answer in ranks.run(save_both, str(tmp_path), FORMS[form]):
        assert answer == [(True, True)] * 2


def save_what_differs(folder: str) -> tuple[bool, str, bool]:
    """The same for states that only some ranks have, and for one that a rank cannot write."""
    rank = dist.get_rank()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = torch.distributed.tensor.distribute_tensor(torch.arange(12.0).view(6, 2), mesh)
    alone = {f"only.{rank}": torch.full((2,), float(rank)), "w": sharded, "word": "x" * rank}
    write_sharded.write_sharded({"model": alone}, Path(folder) / "own", None)
    dcp.save({"model": alone}, checkpoint_id=Path(folder) / "theirs")
    dist.barrier()
    same = files(Path(folder) / "own") == files(Path(folder) / "theirs")

    class Broken(write_sharded.FileSystemWriter):
        def write_data(self, *args: Any) -> Any:
            if rank == 1:
                raise OSError(28, "No space left on device")
            return super().write_data(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_sharded, "FileSystemWriter", Broken)
        said = words_of(write_sharded.write_sharded, {"model": {"w": sharded}}, Path(folder) / "broken", None)
    dist.barrier()
    return same, said, (Path(folder) / "broken/.metadata").exists()


def test_what_ranks_cannot_know_and_what_one_cannot_write(two_ranks: RankPool, tmp_path: Path) -> None:
    for same, said, has_index in two_ranks.run(save_what_differs, str(tmp_path)):
        assert same
        assert "broken: rank 1: OSError: [Errno 28] No space left on device" in said
        assert not has_index
