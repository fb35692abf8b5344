"""A checkpoint is one save: files of another one, and a changed manifest, are errors that name the file."""

import json
import shutil
from pathlib import Path

import pytest

from fsdplaunch.checkpoint.manifest import crc_of_items, find_gap, read_manifest, write_manifest
from fsdplaunch.checkpoint.merge.merge import merge
from fsdplaunch.checkpoint.readers.dcp_index import read_index
from fsdplaunch.errors import CheckpointError

MODEL = "pytorch_model_fsdp_0"


def saved(dcp, folder: Path, value: int) -> Path:
    """A checkpoint of two ranks, whose tensor is filled with a value; all else is equal."""
    draft = dcp.Draft().add("w", (4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))], data=bytes([value]) * 32)
    model = draft.save(folder / MODEL)
    (folder / "scheduler.bin").write_bytes(b"scheduler %d" % value)
    items: dict[str, list[tuple[int, int]]] = {}
    for file, offset, length in read_index(model).places.values():
        items.setdefault(file, []).append((offset, length))
    crcs = {}
    for file, listed in items.items():
        with (model / file).open("rb") as opened:
            crcs[f"{MODEL}/{file}"] = crc_of_items(opened.fileno(), listed)
    models = [{"class": "Net", "tied": []}]
    write_manifest(folder, {"step": value, "models": models}, value, crcs)
    return folder


@pytest.fixture
def two(dcp, tmp_path) -> tuple[Path, Path]:
    return saved(dcp, tmp_path / "one", 1), saved(dcp, tmp_path / "two", 2)


def test_sound_checkpoint_is_merged(two, tmp_path):
    assert find_gap(two[0]) is None
    assert merge(two[0], tmp_path / "out").tensors == 1


@pytest.mark.parametrize("what", ["a rank's file", "files of two ranks", "the model", "the model's data"])
def test_files_of_another_save_are_named(two, tmp_path, what):
    one, other = (folder / MODEL for folder in two)
    if what == "a rank's file":
        shutil.copy(other / "__1_0.distcp", one / "__1_0.distcp")
    elif what == "files of two ranks":
        (one / "__0_0.distcp").rename(one / "x")
        (one / "__1_0.distcp").rename(one / "__0_0.distcp")
        (one / "x").rename(one / "__1_0.distcp")
        shutil.copy(other / "__1_0.distcp", one / "__1_0.distcp")
    elif what == "the model":
        shutil.rmtree(one)
        shutil.copytree(other, one)
    else:
        for path in other.glob("*.distcp"):
            shutil.copy(path, one)
    with pytest.raises(
        CheckpointError, match=r"__[01]_0.distcp does not match its checksum: it is damaged, or from another save"
    ):
        merge(two[0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_small_file_of_another_save_or_a_flipped_bit_makes_a_checkpoint_one_to_pass_over(two):
    shutil.copy(two[1] / "scheduler.bin", two[0] / "scheduler.bin")
    assert (find_gap(two[0]) or "").startswith("scheduler.bin does not match its checksum")
    index = two[1] / MODEL / ".metadata"
    index.write_bytes(index.read_bytes()[:-7] + b"\0" + index.read_bytes()[-6:])
    assert (find_gap(two[1]) or "").startswith(f"{MODEL}/.metadata does not match its checksum")


def test_changed_bytes_of_a_manifest_never_change_what_is_loaded(two):
    path = two[0] / "fsdplaunch.json"
    sound = path.read_bytes()
    right = {name: value for name, value in json.loads(sound).items() if name != "checksum"}
    passed = 0
    for at in range(len(sound)):
        for bit in (0, 4):
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << bit]) + sound[at + 1 :])
            found = read_manifest(two[0])
            passed += bool(found)
            if found:  # white space, or the name of the checksum itself
                assert {name: found.get(name) for name in right} == right
    assert passed < len(sound) / 4
