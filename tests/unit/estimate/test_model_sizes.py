"""Sizes read from headers: what is counted, and what a broken folder says."""

import pytest

from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.model import TensorSize, block_names, describe, read_sizes
from tests.unit.estimate.conftest import write_shard


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


def test_weight_files_that_do_not_fit_are_refused_and_a_tensor_with_two_names_counts_once(model_folder, tmp_path):
    folder = model_folder()
    write_shard(tmp_path / "tied.safetensors", {"embed": (10, 3)}, metadata={"head": "embed"})
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"model-00001-of-00003\.safetensors cannot be read"):
        read_sizes(folder)
    assert read_sizes(tmp_path).parameters == 30


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            [f"{side}.layer.{i}.w" for side in ("encoder", "decoder") for i in range(2)],
            ["decoder.layer.0", "decoder.layer.1", "encoder.layer.0", "encoder.layer.1"],
        ),
        (["layers.0.dense.w", "layers.1.moe.w", "layers.2.moe.w"], ["layers.0", "layers.1", "layers.2"]),
        (
            ["stages.0.a", "stages.1.b", *(f"stages.{s}.blocks.{b}.w" for s in range(2) for b in range(2))],
            ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"],
        ),
        (["net.0.weight", "net.2.weight", "net.4.weight"], []),
        (["0.weight", "1.weight"], ["0", "1"]),
        (["weight", "a.weight", "0"], []),
        ([f"layers.{i}.mlp.experts.{j}.w" for i in range(2) for j in range(4)], ["layers.0", "layers.1"]),
    ],
    ids=["two towers", "an unlike first", "unlike stages", "gaps", "a list itself", "plain names", "experts"],
)
def test_blocks_are_found_by_their_names(names, expected):
    assert sorted(block_names(names)) == expected
