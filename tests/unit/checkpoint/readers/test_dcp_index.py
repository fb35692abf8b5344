"""Reading `.metadata` of every torch version, from what each is known to write."""

import random
import struct
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge
from fsdplaunch.checkpoint.readers.dcp_index import parse_index
from fsdplaunch.checkpoint.safe_pickle import PickledCallable, unpickle
from fsdplaunch.checkpoint.safe_pickle.dcp_classes import INDEX_NAMES
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import check_plain
from fsdplaunch.errors import CheckpointError

SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"


DATA = Path(__file__).parent / "data"
# What stands in the checkpoints under data/, written by two ranks of that torch: name -> dtype, shape.
WRITTEN = {
    **{"a": ("F32", [6, 4]), "b": ("F32", [5, 4]), "c": ("F32", [4, 6]), "one": ("F32", [1, 4]), "s": ("F32", [])},
    **{
        "i": ("I64", [3]),
        "bf": ("BF16", [3, 3]),
        "t": ("F32", [3, 4]),
        "empty": ("F32", [0, 4]),
        "flag": ("BOOL", [2]),
    },
}


@pytest.mark.parametrize("version", ["2.1.2", "2.15.0"])
def test_checkpoint_of_the_oldest_and_newest_torch_is_merged_exactly(dcp, version, tmp_path):
    with zipfile.ZipFile(DATA / f"torch-{version}.zip") as archive:
        archive.extractall(tmp_path / "ckpt")
    merge(tmp_path / "ckpt", tmp_path / "out", options=MergeOptions(verify=True))
    found = dcp.safetensors(tmp_path / "out/model.safetensors")
    eight_bits = found.pop("f8", None)
    assert (eight_bits is None) == (version == "2.1.2")
    assert {name: (dtype, shape) for name, (dtype, shape, _) in found.items()} == WRITTEN
    counting = {n: struct.pack(f"<{n}f", *(at * 37 % 251 for at in range(n))) for n in (4, 20, 24)}
    assert [found[name][2] for name in ("a", "b", "c", "one")] == [counting[n] for n in (24, 20, 24, 4)]
    transposed = struct.unpack("<12f", found["t"][2])
    assert [transposed[4 * (at % 3) + at // 3] for at in range(12)] == [at * 37 % 251 for at in range(12)]
    assert struct.unpack("<f", found["s"][2]) == (3.5,)
    assert found["flag"][2] == b"\1\0"


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("cls", ["PosixPath", "WindowsPath"])
def test_index_with_the_path_it_was_saved_at_is_read(dcp, module, cls):
    draft = dcp.Draft().add("w", (4,))
    path = dcp.Called(dcp.Named(module, cls), ("/", "scratch", "me"))
    meta = {"checkpoint_id": path, "save_id": "0", "load_id": None, "modules": []}
    draft.extra["storage_meta"] = dcp.Made(dcp.Named("torch.distributed.checkpoint.metadata", "StorageMeta"), meta)
    assert parse_index(draft.index(), where="it").tensors


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_index_of_each_pickle_protocol_is_read(dcp, rows, protocol):
    assert len(parse_index(dcp.dumps(rows.metadata(), protocol), where="it").tensors) == 4


def test_chunks_come_in_any_order_and_empty_ones_need_no_bytes(dcp, tmp_path):
    draft = dcp.Draft().add("w", (2, 3), [((0, 0), (1, 3)), ((1, 0), (1, 3))])
    entry = dcp.tensor_entry(
        "float32", (2, 3), [((2, 0), (0, 3)), ((1, 0), (1, 3)), ((0, 0), (1, 3)), ((2, 0), (0, 3))]
    )
    draft.entries["model.w"] = entry
    merge(draft.save(tmp_path / "ckpt"), tmp_path / "out")
    assert dcp.safetensors(tmp_path / "out/model.safetensors")["w"][2] == draft.expected["w"]


def test_entry_without_a_path_is_refused_when_others_have_one(dcp):
    draft = dcp.Draft().add("w", (4,)).add("v", (4,))
    del draft.planner["model.w"]
    with pytest.raises(CheckpointError, match=r"the path of 'model.w' is not a list of keys"):
        parse_index(draft.index(), where="it")


def outcome(raw: bytes) -> object:
    try:
        return parse_index(raw, where="it")
    except CheckpointError:
        return "refused"


def wide(dcp) -> bytes:
    """An index with every width of integer, sizes of one to five dimensions, shared sizes and long names."""
    draft = dcp.Draft()
    shared = dcp.size(300, 2)
    for number, shape in enumerate(
        [(4,), (300, 2), (2, 2, 70_000), (1, 2, 3, 4), (1, 1, 1, 1, 3), (3_000_000_000,)]
    ):
        name = f"layer{number}." + "w" * (number * 60)
        boxes = [((0,) * len(shape), shape)]
        entry = dcp.tensor_entry("float32", shape, boxes)
        if number == 1:
            entry.state["size"] = entry.state["chunks"][0].state["sizes"] = shared
        draft.entries[name] = entry
        place = 10_000_000_000 * number
        draft.storage.append(
            (dcp.index_key(name, boxes[0][0], number), dcp.info("__0_0.distcp", place, 70_000 + number))
        )
    return draft.index()


@pytest.mark.parametrize("make", ["rows", "wide", "2.1.2", "2.15.0"])
def test_records_read_at_once_equal_records_read_step_by_step(dcp, rows, make, monkeypatch):
    if make in {"rows", "wide"}:
        raw = rows.index() if make == "rows" else wide(dcp)
    else:
        raw = zipfile.ZipFile(DATA / f"torch-{make}.zip").read(".metadata")
    chance = random.Random(0)
    changes = [(chance.randrange(len(raw)), 1 << chance.randrange(8)) for _ in range(150)]
    assert_same_outcome(raw, [(0, 0), *changes], monkeypatch)


def test_each_changed_byte_of_a_record_has_the_outcome_of_reading_step_by_step(dcp, monkeypatch):
    boxes = [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((4, 0), (2, 3))]
    raw = dcp.Draft().add("w", (6, 3), boxes).index()
    start = raw.index(b"offsets") + 60  # the second chunk and all that follows it
    assert_same_outcome(raw, [(at, bits) for at in range(start, len(raw)) for bits in (1, 2, 0x80)], monkeypatch)


def assert_same_outcome(raw: bytes, changes: list[tuple[int, int]], monkeypatch) -> None:
    """Each changed index is read, or refused, by both ways alike."""
    spoilt = [raw[:at] + bytes([raw[at] ^ bits]) + raw[at + 1 :] for at, bits in changes]
    fused = [outcome(copy) for copy in spoilt]
    plain = {
        key: replace(made, fuse=None) if isinstance(made, PickledCallable) else made
        for key, made in INDEX_NAMES.items()
    }
    monkeypatch.setattr("fsdplaunch.checkpoint.safe_pickle.dcp_classes.INDEX_NAMES", plain)
    assert fused == [outcome(copy) for copy in spoilt]
    assert 0 < fused.count("refused") < len(fused)


def test_most_records_of_a_real_index_are_read_at_once(monkeypatch):
    read: Counter[str] = Counter()

    def counted(made):
        def count(machine, width):
            done = made.fuse(machine, width)
            read[made.name.rpartition(".")[2]] += done
            return done

        return replace(made, fuse=count)

    patched = {
        key: counted(made) if isinstance(made, PickledCallable) and made.fuse else made
        for key, made in INDEX_NAMES.items()
    }
    monkeypatch.setattr("fsdplaunch.checkpoint.safe_pickle.dcp_classes.INDEX_NAMES", patched)
    index = parse_index(zipfile.ZipFile(DATA / "torch-2.15.0.zip").read(".metadata"), where="it")
    chunks = sum(len(tensor.chunks) for tensor in index.tensors)
    assert chunks / 2 < read["ChunkStorageMetadata"] <= chunks + 1
    assert chunks / 2 < read["MetadataIndex"] <= chunks


@pytest.mark.parametrize(
    ("owner", "name", "good"),
    [
        ("MEM_FORMAT_ENCODING", "TORCH_PRESERVE_FORMAT", True),
        ("MEM_FORMAT_ENCODING", "__class__", False),
        ("TensorProperties", "__init__", False),
    ],
)
def test_memory_format_that_python_3_11_2_has_written_is_read_and_no_other_attribute(dcp, owner, name, good):
    """It writes a call of getattr, which other versions do not."""
    data = dcp.dumps(dcp.Called(dcp.Named("builtins", "getattr"), (dcp.Named(SHARDED_TENSOR, owner), name)))
    if good:
        check_plain(data, "it")
        unpickle(data, INDEX_NAMES, where="it")
        return
    for read in (lambda: check_plain(data, "it"), lambda: unpickle(data, INDEX_NAMES, where="it")):
        with pytest.raises(CheckpointError, match="it looks up an attribute"):
            read()
