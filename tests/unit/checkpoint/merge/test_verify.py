"""Verification: whatever differs between the merged files and the checkpoint, or its checksums, is found."""

import os
from pathlib import Path

import pytest

from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge, prepare_merge
from fsdplaunch.checkpoint.merge.options import ProgressMeter
from fsdplaunch.checkpoint.merge.write import verify_merge, write_plan
from fsdplaunch.checkpoint.readers.data_files import open_data_files
from fsdplaunch.checkpoint.readers.dcp_index import read_index
from fsdplaunch.errors import CheckpointError, UsageError

HALVES = [((0, 0), (8, 3)), ((0, 3), (8, 3))]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(dcp, tmp_path):
    draft = dcp.Draft().add("rows", (8, 6), [((0, 0), (4, 6)), ((4, 0), (4, 6))])
    return draft.add("columns", (8, 6), HALVES).save(tmp_path / "ckpt")


@pytest.fixture
def verify(checkpoint, tmp_path):
    """Merge into several files, let `spoil(folder, plan)` change them, and verify."""

    def run(spoil) -> None:
        prepared = prepare_merge(checkpoint, MergeOptions(max_shard_size=1))
        plan, folder = prepared.plan, tmp_path / "merged"
        folder.mkdir()
        with open_data_files(checkpoint, read_index(checkpoint)) as sources:
            write_plan(plan, sources, folder, ProgressMeter("copy", plan.tensor_bytes, None))
            spoil(folder, plan)
            verify_merge(plan, sources, folder, ProgressMeter("verify", plan.tensor_bytes, None))

    return run


def test_untouched_result_is_verified(verify):
    verify(lambda *_: None)


@pytest.mark.parametrize("name", ["rows", "columns"])
@pytest.mark.parametrize("at", [0, 1, 95, 191])
def test_changed_byte_of_the_result_is_found(verify, name, at):
    def spoil(folder, plan):
        (file,) = [file for file in plan.files if file.tensors[0].name == name]
        data = bytearray((folder / file.name).read_bytes())
        data[file.tensors[0].offset + at] ^= 0x10
        (folder / file.name).write_bytes(data)

    with pytest.raises(CheckpointError, match=f"the merged '{name}' differs from the checkpoint"):
        verify(spoil)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"F32"', b'"I32"'),
        (b'"shape":[8,6]', b'"shape":[6,8]'),
        (b'"rows"', b'"rowt"'),
        (b"[0,192]", b"[1,192]"),
        (b'{"__', b'["__'),
        (b'"__metadata__"', b'"__metadatb__"'),
    ],
)
def test_changed_header_of_the_result_is_found(verify, old, new):
    def spoil(folder, plan):
        (file,) = [file for file in plan.files if file.tensors[0].name == "rows"]
        data = (folder / file.name).read_bytes()
        assert data.count(old) == 1
        (folder / file.name).write_bytes(data.replace(old, new))

    with pytest.raises(CheckpointError, match="has another size or header than planned"):
        verify(spoil)


@pytest.mark.parametrize("change", [b"x", -1])
def test_result_of_another_size_is_found(verify, change):
    def spoil(folder, plan):
        path = folder / plan.files[0].name
        data = path.read_bytes()
        path.write_bytes(data + change if isinstance(change, bytes) else data[:change])

    with pytest.raises(CheckpointError, match="has another size or header than planned"):
        verify(spoil)


@pytest.mark.parametrize(("old", "new"), [('"rows"', '"rowt"'), ("{", "["), ("00001-of", "00002-of")])
def test_changed_index_of_the_result_is_found(verify, old, new):
    def spoil(folder, plan):
        text = (folder / INDEX).read_text()
        assert old in text
        (folder / INDEX).write_text(text.replace(old, new, 1))

    with pytest.raises(CheckpointError, match="is not the index that was planned"):
        verify(spoil)


@pytest.mark.parametrize("name", ["rows", "columns"])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("verify", [True, False])
def test_data_that_does_not_match_its_checksum_is_found(checkpoint, name, half, verify, dcp, tmp_path):
    tensor = next(tensor for tensor in prepare_merge(checkpoint).plan.tensors if tensor.name == name)
    piece = tensor.pieces[half]
    path = checkpoint / piece.place.file
    data = bytearray(path.read_bytes())
    data[piece.file_offset + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"the bytes of 'model.{name}' at \d+ do not match their checksum"):
        merge(checkpoint, tmp_path / "out", options=MergeOptions(verify=verify))
    assert dcp.names(tmp_path) == ["ckpt"]
    assert merge(checkpoint, tmp_path / "unchecked", options=MergeOptions(checksums=False)).unchecked == 2 * 192


def test_checksums_cannot_be_left_out_of_a_verified_merge():
    with pytest.raises(UsageError, match="compares the checksums as well"):
        MergeOptions(checksums=False, verify=True)


def test_result_is_forced_to_disk_before_it_appears(checkpoint, tmp_path, monkeypatch):

    synced, real = [], os.fsync

    def fsync(fd):
        synced.append((Path(f"/proc/self/fd/{fd}").readlink().name, (tmp_path / "out").exists()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    merge(checkpoint, tmp_path / "out")
    assert ("model.safetensors", False) in synced
    assert synced[-1] == (tmp_path.name, True)
    assert [name.startswith(".out.partial-") and not there for name, there in synced].count(True) == 1
