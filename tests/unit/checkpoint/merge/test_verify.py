"""Verification: whatever differs between the merged files and the checkpoint, or its checksums, is found."""

import os
from pathlib import Path

import pytest

from fsdplaunch.checkpoint.merge import ProgressMeter
from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge, prepare_merge
from fsdplaunch.checkpoint.merge.write import verify_merge, write_plan
from fsdplaunch.checkpoint.readers.open import open_checkpoint
from fsdplaunch.errors import CheckpointError

INDEX = "model.safetensors.index.json"
HEADER = "does not have the planned size or header"
CHANGES = [
    *(("rows", old, new, HEADER) for old, new in ((b'"F32"', b'"I32"'), (b'"shape":[8,6]', b'"shape":[6,8]'))),
    *(("rows", old, new, HEADER) for old, new in ((b'"rows"', b'"rowt"'), (b"[0,192]", b"[1,192]"))),
    *(("rows", old, new, HEADER) for old, new in ((b'{"__', b'["__'), (b"metadata__", b"metadatb__"))),
    *(("columns", end, None, HEADER) for end in (b"x", b"")),
    *((name, at, None, f"the merged '{name}' differs") for name in ("rows", "columns") for at in (0, 1, 95, 191)),
    *(
        (INDEX, old, new, "is not the index that was planned")
        for old, new in ((b'"rows"', b'"rowt"'), (b"{", b"["))
    ),
]


@pytest.fixture
def checkpoint(dcp, tmp_path):
    draft = dcp.Draft().add("rows", (8, 6), [((0, 0), (4, 6)), ((4, 0), (4, 6))])
    return draft.add("columns", (8, 6), [((0, 0), (8, 3)), ((0, 3), (8, 3))]).save(tmp_path / "ckpt")


def test_every_change_of_the_result_is_found(checkpoint, tmp_path):
    plan, folder = prepare_merge(checkpoint, MergeOptions(max_shard_size=1)).plan, tmp_path / "merged"
    files = {file.tensors[0].name: file for file in plan.files}
    folder.mkdir()

    def verify() -> None:
        verify_merge(plan, opened.sources, folder, ProgressMeter("verify", plan.tensor_bytes, None))

    with open_checkpoint(checkpoint) as opened:
        write_plan(plan, opened.sources, folder, ProgressMeter("copy", plan.tensor_bytes, None))
        verify()
        for where, old, new, message in CHANGES:
            path = folder / (files[where].name if where in files else where)
            sound = path.read_bytes()
            if isinstance(old, int):
                at = files[where].tensors[0].offset + old
                path.write_bytes(sound[:at] + bytes([sound[at] ^ 0x10]) + sound[at + 1 :])
            elif new is None:
                path.write_bytes(sound + old if old else sound[:-1])
            else:
                path.write_bytes(sound.replace(old, new, 1))
            assert path.read_bytes() != sound
            with pytest.raises(CheckpointError, match=message):
                verify()
            path.write_bytes(sound)


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


def test_merge_without_stored_checksums_is_still_compared(dcp, tmp_path):
    draft = dcp.Draft().add("w", (8, 2), [((0, 0), (4, 2)), ((4, 0), (4, 2))], crc=False)
    result = draft.merged(tmp_path, verify=True)
    assert (result.verified, result.unchecked) == (True, 64)


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
