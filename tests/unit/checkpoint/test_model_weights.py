"""Which files of a model folder are its weights, and what headers that lie are met with."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from fsdplaunch.checkpoint.model_weights import find_weight_files
from fsdplaunch.errors import CheckpointError


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def write(path: Path, header: dict[str, Any], data: int = 64) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * data)
    return path


def test_tensors_are_where_the_header_says(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"a": entry(0, 16, [2, 2]), "b": entry(16, 24)})
    files = find_weight_files(tmp_path)
    start = path.stat().st_size - 64
    assert files.paths == (path,)
    assert {name: (w.shape, w.start - start) for name, w in files.weights.items()} == {
        "a": ((2, 2), 0),
        "b": ((2,), 16),
    }


def test_usual_name_goes_before_other_files(tmp_path: Path) -> None:
    write(tmp_path / "adapter.safetensors", {"x": entry(0, 4)})
    write(tmp_path / "model.safetensors", {"a": entry(0, 4)})
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert list(find_weight_files(tmp_path).weights) == ["a"]


def test_names_left_out_as_equal_are_found_again(tmp_path: Path) -> None:
    header = {"__metadata__": {"head": "embed", "format": "pt"}, "embed": entry(0, 16)}
    write(tmp_path / "model.safetensors", header)
    weights = find_weight_files(tmp_path).weights
    assert weights["head"].start == weights["embed"].start


def test_numbered_files_are_taken_together(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / f"model-0000{number}-of-00002.safetensors", {f"t{number}": entry(0, 4)})
    assert set(find_weight_files(tmp_path).weights) == {"t1", "t2"}


BAD: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "past the end": ({"model.safetensors": {"a": entry(0, 400)}}, "cut short: 'a' ends at byte"),
    "shared bytes": ({"model.safetensors": {"a": entry(0, 16), "b": entry(8, 24)}}, "'a' and 'b' share bytes"),
    "size": ({"model.safetensors": {"a": entry(0, 16, [3])}}, "'a' of shape [3] does not fill its 16 bytes"),
    "backwards": ({"model.safetensors": {"a": entry(16, 8, [2])}}, "does not fill its -8 bytes"),
    "negative": ({"model.safetensors": {"a": entry(-4, 0, [1])}}, "an offset of 'a' is -4"),
    "huge": ({"model.safetensors": {"a": entry(0, 16, [2**70])}}, "the shape of 'a'"),
    "no table": ({"model.safetensors": {"a": 3}}, "no safetensors header"),
    "twice": ({f"model-0000{n}-of-00002.safetensors": {"a": entry(0, 4)} for n in (1, 2)}, "both hold 'a'"),
    "one of two": ({"model-00002-of-00002.safetensors": {"a": entry(0, 4)}}, "model-00001-of-00002.safetensors"),
    "several": ({"a.safetensors": {}, "b.safetensors": {}}, "nothing says which is the model"),
    "shards": ({"shard-00001-model-00001-of-00001.safetensors": {"a": entry(0, 4)}}, "files of single ranks"),
    "empty": ({}, "holds no weights"),
}


@pytest.mark.parametrize("case", BAD)
def test_files_that_cannot_be_trusted_are_refused(tmp_path: Path, case: str) -> None:
    files, words = BAD[case]
    for name, header in files.items():
        write(tmp_path / name, header)
    with pytest.raises(CheckpointError) as caught:
        find_weight_files(tmp_path)
    assert words in str(caught.value)


INDEXES: dict[str, tuple[str, str]] = {
    "not json": ("{", "not an index of weight files"),
    "no map": ("[]", "not an index of weight files"),
    "outside": ('{"weight_map": {"a": "../model.safetensors"}}', "it names the file '../model.safetensors'"),
    "not there": ('{"weight_map": {"a": "other.safetensors"}}', "other.safetensors is not there"),
    "not in it": (
        '{"weight_map": {"b": "model.safetensors"}}',
        "'b' is in 'model.safetensors', but it is in none",
    ),
}


@pytest.mark.parametrize("case", INDEXES)
def test_index_that_does_not_fit_the_files_is_refused(tmp_path: Path, case: str) -> None:
    text, words = INDEXES[case]
    write(tmp_path / "model.safetensors", {"a": entry(0, 4)})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        find_weight_files(tmp_path)
    assert words in str(caught.value)
