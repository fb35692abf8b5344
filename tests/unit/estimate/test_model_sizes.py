"""Sizes read from headers: what is counted, and what a broken folder says."""

import json

import pytest

from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.model import TensorSize, describe, read_sizes


def test_folder_of_shards_holds_what_its_config_describes(model_folder, llama):
    found = read_sizes(model_folder(shards=7))
    described = describe(llama, source="config").sizes
    assert found.parameters == described.parameters
    assert found.depth == 12
    assert found.itemsize == 2
    assert found.stored == 2 * found.parameters
    assert {name: tensor.shape for name, tensor in found.names.items()} == {
        name: tensor.shape for name, tensor in described.names.items()
    }


def test_blocks_and_root_make_the_whole_model(model_folder):
    sizes = read_sizes(model_folder())
    assert sizes.root.parameters == 2 * 32000 * 1024 + 1024
    assert sum(unit.parameters * unit.count for unit in sizes.blocks) + sizes.root.parameters == sizes.parameters


def test_first_ranks_share_is_whole_rows_rounded_up():
    assert TensorSize((10, 3), 4).share(4) == 9
    assert TensorSize((10, 3), 4).share(64) == 3
    assert TensorSize((10, 3), 4).share(1) == 30


def test_shard_that_was_cut_short_is_named_with_both_lengths(model_folder):
    folder = model_folder()
    path = folder / "model-00001-of-00003.safetensors"
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(whole - 1)
    with pytest.raises(UsageError, match=f"00001-of-00003.*has {whole - 1} bytes, its header says {whole}"):
        read_sizes(folder)


def test_tensor_that_its_file_lacks_is_named(model_folder):
    folder = model_folder()
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["model.extra"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(listed))
    with pytest.raises(UsageError, match=r"says that model-00001-of-00003\.safetensors holds model\.extra"):
        read_sizes(folder)
