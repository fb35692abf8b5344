"""Pipes, sockets, folders, devices and links to nowhere in a checkpoint: named at once, never waited for."""

import json
import os
import socket
from pathlib import Path

import pytest

from fsdplaunch.checkpoint.manifest import find_gap, write_manifest
from fsdplaunch.checkpoint.merge.merge import merge
from fsdplaunch.checkpoint.readers.dcp_index import read_index
from fsdplaunch.checkpoint.safetensors_format import read_header, read_weight_map
from fsdplaunch.checkpoint.untrusted_files import InvalidFileError, read_regular
from fsdplaunch.errors import CheckpointError, LaunchError


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # a socket's full path may be too long for the system


KINDS = {
    "a named pipe": os.mkfifo,
    "a socket": _socket,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link that leads nowhere": lambda path: path.symlink_to(path.name),
}


@pytest.fixture(params=KINDS)
def kind(request, tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    return request.param


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_file_of_a_checkpoint_that_is_none_is_named(dcp, kind, name, tmp_path):
    folder = dcp.Draft().add("w", (4,)).save(tmp_path / "ckpt")
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    with pytest.raises(CheckpointError, match=rf"{name}.*( is not a regular file|Too many levels)") as caught:
        merge(folder, tmp_path / "out")
    assert caught.value.hint
    assert dcp.names(tmp_path) == ["ckpt"]


def test_readers_of_single_files_name_what_stands_there(kind, tmp_path):
    for read in (read_header, read_weight_map, lambda path: read_regular(path, 100)):
        path = tmp_path / f"file{read.__name__}"
        KINDS[kind](path)
        with pytest.raises(InvalidFileError, match=kind):
            read(path)
    KINDS[kind](tmp_path / ".metadata")
    with pytest.raises(CheckpointError, match=f"is not a regular file but {kind}"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    "name", ["../.metadata", "/.metadata", "a/b/.metadata", "x", "\0/.metadata", "/etc/passwd"]
)
def test_manifest_has_no_other_files_read(tmp_path, name):
    (tmp_path / "fsdplaunch.json").write_text(json.dumps({"complete": True, "files": {}, "crc32": {name: 1}}))
    gap = find_gap(tmp_path)
    assert gap is None or name == "\0/.metadata"


def test_manifest_that_is_no_file_or_nests_deeply_makes_a_checkpoint_incomplete(kind, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    write_manifest(tmp_path, {}, 1)
    assert find_gap(tmp_path) is None
    (tmp_path / "fsdplaunch.json").write_text("[" * 200_000)
    assert find_gap(tmp_path) == "its manifest cannot be read"
    (tmp_path / "fsdplaunch.json").unlink()
    KINDS[kind](tmp_path / "fsdplaunch.json")
    assert find_gap(tmp_path) is not None


def test_links_that_lead_in_a_circle_are_neither_source_nor_output(dcp, tmp_path):
    checkpoint = dcp.Draft().add("w", (2, 2), [((0, 0), (2, 2))]).save(tmp_path / "ckpt")
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for source, output in ((loop, tmp_path / "out"), (checkpoint, loop), (checkpoint, loop / "out")):
        with pytest.raises(LaunchError):
            merge(source, output)
    assert not (tmp_path / "out").exists()
