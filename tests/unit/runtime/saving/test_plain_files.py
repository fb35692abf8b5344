"""Values and tensors of a checkpoint come back; what is hostile, damaged or half described is refused by name."""

import collections
import io
import os
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.saving.plain_files import load_plain, packed, read_plain
from fsdplaunch.runtime.saving.safe_dcp_reader import SafePlanner, SafeReader

PLAIN = {
    "numbers": {"a": 1, "b": -(2**62), "c": 2.5, "d": True, "e": None, 3: "x", (1, "y"): [b"z"]},
    "wide": {"state": 2**128 - 1},
    "nested": [[{"x": (1, (2, (3,)))}], collections.OrderedDict(y=1)],
    "random": random.Random(1).getstate(),
    "tensors": {
        "f": torch.arange(6.0).reshape(2, 3).t(),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "n": torch.ones(0),
    },
    "parameter": {"w": torch.nn.Parameter(torch.ones(2))},
    "kinds": [torch.float16, torch.Size([1, 2]), torch.device("cpu"), 1 + 2j],
    "set": {"names": {1, 2, 3}},
}


def _same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return one == other


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_come_back(tmp_path, name):
    torch.save(PLAIN[name], tmp_path / "f")
    assert _same(PLAIN[name], read_plain(tmp_path / "f"))
    assert _same(PLAIN[name], load_plain((tmp_path / "f").read_bytes(), "it"))
    assert _same(PLAIN[name], load_plain(packed(PLAIN[name], "it"), "it"))


def _zip_with(description: bytes) -> bytes:
    box = io.BytesIO()
    torch.save(1, box)
    changed = io.BytesIO()
    with zipfile.ZipFile(box) as old, zipfile.ZipFile(changed, "w") as new:
        for each in old.infolist():
            new.writestr(each.filename, description if each.filename.endswith("data.pkl") else old.read(each))
    return changed.getvalue()


HOSTILE = {
    "code": pickle.dumps(os.system, 2),
    "nested tuples as a key": b"\x80\x02}N" + b"\x85" * 100_000 + b"Ns.",
    "a memo slot far away": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a long number": b"\x80\x02I" + b"9" * 100_000 + b"\n.",
    "a state of slots": b"\x80\x02cpathlib\nPosixPath\n)\x81N}X\x01\x00\x00\x00aNs\x86b.",
    "tuples": b"\x80\x02(" + b"(Nt" * 1_300_000 + b"t.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values_are_refused_whatever_file_they_are_in(tmp_path, name):
    (tmp_path / "f").write_bytes(_zip_with(HOSTILE[name]))
    with pytest.raises(CheckpointError, match="safe to read"):
        read_plain(tmp_path / "f")
    with pytest.raises(CheckpointError, match="safe to read"):
        load_plain(_zip_with(HOSTILE[name]), "it")


def test_damaged_and_odd_files_are_named(tmp_path):
    torch.save(1, tmp_path / "old", _use_new_zipfile_serialization=False)
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "f")
    data = bytearray((tmp_path / "f").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "f").write_bytes(data)
    for name, content in enumerate((b"", b"PK", b"x" * 100, bytes(data[:700]))):
        (tmp_path / str(name)).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    words = {"old": "old: it is not a zip file", "f": "'f/data/0' does not match its checksum", "none": "No such"}
    words |= {"pipe": "not a regular file", ".": "not a regular file"} | {str(number): "" for number in range(4)}
    for name, said in words.items():
        with pytest.raises(CheckpointError, match=said) as caught:
            read_plain(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert name not in ("pipe", ".", "none") or "readable" in str(caught.value.hint)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    state = {
        "w": torch.arange(5000.0).reshape(50, 100),
        "h": torch.ones(7, dtype=torch.float16),
        "n": [1, {"a": "b"}],
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def _load(folder: Path) -> dict:
    state = {"w": torch.zeros(50, 100), "h": torch.zeros(7, dtype=torch.float16), "n": [0, {"a": ""}]}
    dcp.load(state, storage_reader=SafeReader(folder), planner=SafePlanner(), no_dist=True)
    return state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_flipped_bits_of_a_sharded_checkpoint_never_load_as_other_values(sharded):
    right = _load(sharded)
    assert torch.equal(right["w"], torch.arange(5000.0).reshape(50, 100))
    assert right["n"] == [1, {"a": "b"}]
    (file,) = sharded.glob("*.distcp")
    sound, chance, refused = file.read_bytes(), random.Random(3), 0
    for _ in range(60):
        spoilt = bytearray(sound)
        spoilt[chance.randrange(len(sound))] ^= 1 << chance.randrange(8)
        file.write_bytes(spoilt)
        try:
            loaded = _load(sharded)
        except (CheckpointError, dcp.api.CheckpointException):
            refused += 1
        else:
            assert _same(loaded, right)
    assert refused > 30


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("fields", [5, 6])
def test_index_with_or_without_strides_is_read(tmp_path, monkeypatch, fields):
    """torch 2.15 writes six facts of a tensor, older versions five."""
    told = TensorProperties.__getstate__
    with monkeypatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", lambda self: (*told(self)[:5], (1,))[:fields])
        dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path, no_dist=True)
    read = {"w": torch.zeros(4)}
    dcp.load(read, storage_reader=SafeReader(tmp_path), planner=SafePlanner(), no_dist=True)
    assert torch.equal(read["w"], torch.arange(4.0))


def test_weights_that_an_index_only_half_describes_are_not_left_as_they_were(sharded):
    index = pickle.loads((sharded / ".metadata").read_bytes())
    one, other, *_ = index.storage_data.values()
    other.offset = one.offset
    (sharded / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="share bytes"):  # more such: tests/unit/checkpoint/safe_pickle
        SafeReader(sharded).read_metadata()
