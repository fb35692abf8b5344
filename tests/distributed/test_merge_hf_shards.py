"""Sharded safetensors by torch's HuggingFaceStorageWriter, merged and compared with what was distributed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge, prepare_merge
from fsdplaunch.errors import CheckpointError
from tests.distributed.pool import RankPool

PLACED = {
    "model.embed_tokens.weight": (torch.arange(70.0).reshape(10, 7), Shard(0)),
    "model.columns.weight": (torch.arange(55).reshape(5, 11).bfloat16(), Shard(1)),
    "model.few.weight": (torch.arange(6.0).reshape(2, 3), Shard(0)),
    "model.norm.weight": (torch.arange(4.0), Replicate()),
    "model.steps": (torch.arange(9), Shard(0)),
    "model.middle": (torch.arange(60, dtype=torch.float16).reshape(3, 4, 5), Shard(1)),
    "model.scalar": (torch.tensor(3.5), None),
    "model.truth": (torch.tensor([True, False, True]), None),
    "model.empty": (torch.empty(0, 4), None),
}


def save_shards(folder: str) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        name: value if place is None else distribute_tensor(value, mesh, [place])
        for name, (value, place) in PLACED.items()
    }
    files = {name: 1 + (at % 2) for at, name in enumerate(PLACED)}
    for name, mapping in (("one", None), ("two", files)):
        writer = HuggingFaceStorageWriter(f"{folder}/{name}", mapping, save_distributed=True)
        dcp.save(state, storage_writer=writer)


@pytest.fixture(scope="module")
def saved(four_ranks: RankPool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    four_ranks.run(save_shards, str(folder))
    return folder


@pytest.mark.parametrize("name", ["one", "two"])
def test_merge_of_sharded_safetensors_equals_what_was_distributed(name, saved, tmp_path):
    result = merge(saved / name, tmp_path / "out", options=MergeOptions(verify=True))
    found = load_file(tmp_path / "out/model.safetensors")
    assert sorted(found) == sorted(PLACED)
    for key, (value, _) in PLACED.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), key
        assert torch.equal(found[key], value), key
    save_file(found, tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "library.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
    assert (result.tensors, result.skipped) == (len(PLACED), ())


def test_merge_finds_shards_below_the_consolidated_folder_and_writes_the_torch_format(saved, tmp_path):
    shutil.copytree(saved / "one", tmp_path / "run/sharded")
    (tmp_path / "run/config.json").write_text("{}")
    assert prepare_merge(tmp_path / "run").folder == tmp_path / "run/sharded"
    merge(tmp_path / "run", tmp_path / "out", options=MergeOptions(safe_serialization=False))
    found = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    assert all(torch.equal(found[key], value) for key, (value, _) in PLACED.items())


def test_removal_after_a_verified_merge_deletes_the_shards_only(saved, tmp_path):
    shutil.copytree(saved / "one", tmp_path / "ckpt")
    (tmp_path / "ckpt/notes.txt").write_text("mine")
    merge(tmp_path / "ckpt", tmp_path / "out", options=MergeOptions(remove_checkpoint_dir=True))
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == ["notes.txt"]


def test_missing_rank_or_file_is_named(saved, tmp_path):
    shutil.copytree(saved / "one", tmp_path / "ckpt")
    (tmp_path / "ckpt/shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="chunks cover") as caught:
        merge(tmp_path / "ckpt", tmp_path / "out")
    assert "no file of shard 2" in caught.value.hint
    shutil.copytree(saved / "two", tmp_path / "half")
    for path in (tmp_path / "half").glob("*-model-00001-of-00002.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"lacks shard-\*-model-00001-of-00002.safetensors"):
        merge(tmp_path / "half", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def altered(header: dict, change: str) -> dict:
    told = header["__metadata__"]
    if change == "garbage":
        return {"w": 3}
    if change == "offsets":
        told["DCP_SHARDING_INFO"] = json.dumps({"w": {"saved_offsets": [-1, 0]}})
    elif change == "dimensions":
        told["DCP_SHARDING_INFO"] = json.dumps({"w": {"saved_offsets": [0]}})
    elif change == "huge":
        header["w"]["shape"] = [2**62, 2**62]
    elif change == "outside":
        header["w"]["data_offsets"] = [8, 40]
    elif change == "shared":
        header["v"] = header["w"]
    elif change == "dtype":
        header["w"]["dtype"] = "F3"
    return header


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("garbage", "the entry of 'w' is not a tensor's"),
        ("offsets", "the place of 'w' is -1"),
        ("dimensions", "fits no other shard"),
        ("huge", "does not fill its 32 bytes"),
        ("outside", "it is cut short: 'w' ends at byte"),
        ("shared", "'v' and 'w' share bytes"),
        ("dtype", "'F3', which is not known"),
        ("length", "its header is said to have 4611686018427387904 bytes"),
        ("empty", "its header is said to have 0 bytes, the file has 0"),
        ("deep", "it has no safetensors header"),
    ],
)
def test_damaged_or_hostile_shard_is_refused(change, message, tmp_path):
    header = {
        "__metadata__": {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0, 0]}})},
        "w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    }
    text = json.dumps(altered(header, change)).encode() if change != "deep" else b"[" * 200_000
    length = 2**62 if change == "length" else len(text)
    data = b"" if change == "empty" else length.to_bytes(8, "little") + text + bytes(32)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt/shard-00001-model-00001-of-00001.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        merge(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
