"""Files of single ranks, written by real torch, are put together without it."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdplaunch
from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge
from fsdplaunch.errors import CheckpointError
from tests.distributed.pool import RankError, RankPool
from tests.distributed.tiny import build, plugin

VERL = "model_world_size_{world}_rank_{rank}.pt"
ACCELERATE = "pytorch_model_fsdp_0_rank{rank}.bin"


def model() -> nn.Module:
    torch.manual_seed(0)
    built = nn.Sequential(
        nn.Linear(6, 10), nn.Sequential(nn.Linear(10, 7), nn.BatchNorm1d(7)), nn.Linear(7, 1, bias=False)
    )
    built.register_buffer("steps", torch.tensor(7))
    return built


def put(state: object, folder: Path, pattern: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / pattern.format(world=dist.get_world_size(), rank=dist.get_rank()))


def version_1(**kind) -> FullyShardedDataParallel:
    policy = ModuleWrapPolicy({nn.Sequential})
    return FullyShardedDataParallel(model(), auto_wrap_policy=policy, device_id=torch.device("cpu"), **kind)


def write_two(folder: str) -> None:
    """What accelerate and verl write of models of both versions."""
    place, whole = Path(folder), FullyShardedDataParallel
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    for flat in (False, True):
        sharded = version_1(use_orig_params=not flat)
        with whole.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()):
            put(sharded.state_dict(), place / f"shards-{flat}", ACCELERATE)
        with whole.state_dict_type(sharded, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
            put(sharded.state_dict(), place / f"local-{flat}", "pytorch_model_fsdp_rank{rank}.bin")
    on_mesh = version_1(use_orig_params=False, device_mesh=mesh)
    with whole.state_dict_type(on_mesh, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()):
        put(on_mesh.state_dict(), place / "verl-1", VERL)
    second = model().bfloat16()
    fully_shard(second[1], mesh=mesh)
    fully_shard(second, mesh=mesh)
    put({**second.state_dict(), "version": 3}, place / "verl-2" / "actor", VERL)
    if dist.get_rank() == 0:
        torch.save(model().state_dict(), place / "whole.pt")


def write_four(folder: str) -> None:
    """Tensors on meshes of two dimensions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    placements = {
        "hybrid": [Replicate(), Shard(0)],
        "both": [Shard(0), Shard(1)],
        "same": [Shard(0), Shard(0)],
        "columns": [Shard(1), Replicate()],
    }
    state = {
        f"{name}{rows}": distribute_tensor(torch.arange(rows * 5.0).reshape(rows, 5), mesh, kind)
        for name, kind in placements.items()
        for rows in (1, 4, 7)
    }
    put(state, Path(folder) / "meshes", ACCELERATE)
    split = distribute_tensor(torch.arange(20.0).reshape(4, 5), mesh["inner"], [Shard(0)])
    layer = nn.ParameterDict({"split": nn.Parameter(split)})
    fully_shard(layer, mesh=mesh["outer"])
    put(dict(layer.state_dict()), Path(folder) / "strided", ACCELERATE)


@pytest.fixture(scope="module")
def two(two_ranks: RankPool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    two_ranks.run(write_two, str(folder))
    return folder


def merged(source: Path, output: Path) -> dict[str, torch.Tensor]:
    result = merge(source, output, options=MergeOptions(verify=True))
    assert result.skipped == (("version",) if source.name == "verl-2" else ())
    return load_file(output / "model.safetensors")


@pytest.mark.parametrize("name", ["shards-False", "shards-True", "verl-1", "verl-2"])
def test_files_of_ranks_become_the_whole_model(two, name, tmp_path):
    whole = torch.load(two / "whole.pt", weights_only=True)
    if name == "verl-2":
        whole = {key: value.bfloat16() if value.is_floating_point() else value for key, value in whole.items()}
    found = merged(two / name, tmp_path / "out")
    assert found.keys() == whole.keys()
    assert all(found[key].dtype == whole[key].dtype and torch.equal(found[key], whole[key]) for key in whole)


def test_parts_on_meshes_of_two_dimensions_are_put_in_place(four_ranks: RankPool, tmp_path):
    four_ranks.run(write_four, str(tmp_path))
    found = merged(tmp_path / "meshes", tmp_path / "out")
    assert len(found) == 12
    for name, tensor in found.items():
        rows = int(name[-1])
        assert torch.equal(tensor, torch.arange(rows * 5.0).reshape(rows, 5)), name
    with pytest.raises(CheckpointError, match="placed by '_StridedShard', which cannot be put together"):
        merge(tmp_path / "strided", tmp_path / "no")


@pytest.mark.parametrize("name", ["local-False", "local-True"])
def test_flat_parameters_are_refused_with_the_way_out(two, name, tmp_path):
    with pytest.raises(CheckpointError, match=r"flat parameters \(LOCAL_STATE_DICT\)") as caught:
        merge(two / name, tmp_path / "out")
    assert "SHARDED_STATE_DICT" in caught.value.hint
    assert not (tmp_path / "out").exists()


def save_hybrid(folder: str) -> None:
    local = {"fsdp_version": 1, "use_orig_params": False, "state_dict_type": "LOCAL_STATE_DICT"}
    copies = plugin(**local, sharding_strategy="HYBRID_SHARD", dp_replicate_size=2)
    fsdplaunch.save_checkpoint(folder, model=fsdplaunch.prepare(build(), plugin=copies))


def test_flat_parameters_of_a_model_with_copies_are_not_saved(four_ranks: RankPool, tmp_path):
    with pytest.raises(RankError, match="LOCAL_STATE_DICT cannot hold a model with replicas"):
        four_ranks.run(save_hybrid, str(tmp_path / "ckpt"))
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize("name", ["pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"])
def test_whole_model_in_one_file_becomes_safetensors(name, tmp_path):
    (tmp_path / "ckpt" / "optimizer_0").mkdir(parents=True)
    state = model().state_dict()
    state["twin"] = state["0.weight"]
    state["turned"] = torch.arange(12.0).reshape(3, 4).T
    state["row"] = torch.arange(12.0).reshape(3, 4)[1]
    torch.save(state, tmp_path / "ckpt" / name)
    found = merged(tmp_path / "ckpt", tmp_path / "out")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)


def test_removal_after_the_merge_takes_the_files_of_all_ranks(two, tmp_path):
    folder = shutil.copytree(two / "verl-1", tmp_path / "ckpt")
    (folder / "fsdp_config.json").write_text("{}")
    merge(folder, tmp_path / "out", options=MergeOptions(remove_checkpoint_dir=True))
    assert [path.name for path in folder.iterdir()] == ["fsdp_config.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / VERL.format(world=2, rank=1)).unlink(), "lacks the files of 1 of 2 ranks: 1"),
        (
            lambda folder: shutil.copy(folder / VERL.format(world=2, rank=0), folder / ACCELERATE.format(rank=0)),
            "holds 2 models: ",
        ),
        (
            lambda folder: shutil.copy(
                folder / VERL.format(world=2, rank=0), folder / VERL.format(world=2, rank=1)
            ),
            "cover|of shape",
        ),
        (lambda folder: os.truncate(folder / VERL.format(world=2, rank=1), 3000), "cannot be read"),
        (lambda folder: (folder / VERL.format(world=2, rank=1)).write_bytes(b""), "cannot be read"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(two, change, message, tmp_path):
    folder = shutil.copytree(two / "verl-1", tmp_path / "ckpt")
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        merge(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Trap:
    def __reduce__(self):
        return os.system, ("touch trapped",)


@pytest.mark.parametrize(
    "state",
    [
        {"w": Trap()},
        {"w": torch.ones(2), "more": [Trap()]},
        {"w": torch.ones(2), "f": eval},
        [torch.ones(2)],
        {"w": torch.ones(2, 2).to_sparse()},
    ],
)
def test_file_that_names_what_no_model_needs_is_refused_and_not_run(state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt").mkdir()
    torch.save(state, tmp_path / "ckpt" / "pytorch_model_fsdp.bin")
    with pytest.raises(CheckpointError):
        merge(tmp_path / "ckpt", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_changed_bytes_give_the_right_result_or_an_error(two, tmp_path):
    whole = torch.load(two / "whole.pt", weights_only=True)
    folder = shutil.copytree(two / "verl-1", tmp_path / "ckpt")
    path = folder / VERL.format(world=2, rank=1)
    raw = path.read_bytes()
    refused = 0
    for place in range(11, len(raw), 127):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0x21]) + raw[place + 1 :])
        out = tmp_path / f"out{place}"
        try:
            found = merged(folder, out)
        except CheckpointError as problem:
            assert re.match(r"\S", problem.message)
            refused += 1
        else:
            assert all(torch.equal(found[key], whole[key]) for key in whole), place
    assert refused > 5
