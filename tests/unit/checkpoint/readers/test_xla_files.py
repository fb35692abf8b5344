"""Files of single ranks of PyTorch/XLA are put together without torch_xla.

`xla_2_9` holds what torch_xla 2.9.0 wrote for each of three ranks, of `model()` below: padded slices, flattened
units, slices by rows. The other files are written here, in the same form.
"""

import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from fsdplaunch.checkpoint.chunks import Region, find_tiling_fault, flat_offset, is_dense, row_major
from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge
from fsdplaunch.checkpoint.readers.xla_files import rectangles
from fsdplaunch.errors import CheckpointError

WRITTEN = Path(__file__).with_name("xla_2_9")
NAME = "rank{rank}-of-{world}-pytorch_model.bin"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.register_buffer("steps", torch.tensor([3.5]))


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(Model().state_dict())


def merged(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    merge(folder, out, options=MergeOptions(verify=True))
    return load_file(out / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return sorted(one) == sorted(other) and all(torch.equal(one[name], other[name]) for name in one)


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_rectangles_of_neighbouring_runs_tile_the_tensor_and_are_few(shape, data):
    whole = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, whole), max_size=4)))
    boxes: list[Region] = []
    for begin, end in zip([0, *cuts], [*cuts, whole], strict=True):
        at, before = begin, len(boxes)
        for start, box in rectangles(shape, begin, end):
            assert start == at == flat_offset(shape, box.offsets)
            assert is_dense(box.sizes, row_major(shape))
            at += box.numel
            boxes.append(box)
        assert at == max(begin, end)
        assert len(boxes) - before <= max(1, 2 * len(shape) - 1)
    assert find_tiling_fault(shape, boxes) is None


@pytest.mark.parametrize("form", ["padded", "flattened", "by_dim_0"])
def test_what_torch_xla_wrote_is_merged(form, tmp_path):
    assert same(merged(WRITTEN / form, tmp_path / "out"), model())


def cut(tensor: torch.Tensor, world: int, *, multiple: int = 128) -> list[torch.Tensor]:
    """A tensor's slices, one per rank, the last ones padded with zeros."""
    flat = tensor.flatten()
    part = -(-flat.numel() // (world * multiple)) * multiple
    padded = torch.cat([flat, flat.new_zeros(part * world - flat.numel())])
    return [padded[rank * part : (rank + 1) * part].clone() for rank in range(world)]


def write(folder: Path, world: int, tensors: dict[str, torch.Tensor], *, name: str = NAME, **said) -> None:
    """Write files of one unit as torch_xla does; sizes are torch.Size, as torch.save has them."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {own: f"_fsdp_shard.{own}" for own in tensors}
    info = {
        key: {"_orig_size": tensors[own].size(), "_orig_name": f"_fpw_module.{own}"} for own, key in keys.items()
    }
    slices = {own: cut(tensor, world) for own, tensor in tensors.items()}
    for rank in range(world):
        metadata = {
            "shard_info": {"": info},
            "flatten_info": {},
            "buffer_info": {"x": {"_orig_dtype": torch.float32}},
        }
        metadata |= {"world_size": world, "rank": rank, **said}
        state = {keys[own]: parts[rank] for own, parts in slices.items()}
        both = {"model": state, "shard_metadata": metadata, "optimizer": {"state": {}, "param_groups": []}}
        torch.save(both, folder / name.format(rank=rank, world=world))


@pytest.mark.parametrize("world", [1, 2, 7, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_ranks(tmp_path, world, dtype):
    torch.manual_seed(world)
    shapes = {"a.weight": (300, 5), "b": (1,), "c": (129,), "d.e": (3, 4, 5), "scalar": ()}
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    write(tmp_path / "saved", world, tensors, name="rank-{rank}-of-{world}.pth")
    assert same(merged(tmp_path / "saved", tmp_path / "out"), tensors)


def test_a_checkpoints_folder_leads_to_the_model_in_it(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3)}
    write(tmp_path / "saved" / "pytorch_model_fsdp_0", 2, tensors)
    write(tmp_path / "saved" / "optimizer_0", 2, {"b": torch.ones(3)}, name="rank{rank}-of-{world}-optimizer.bin")
    assert same(merged(tmp_path / "saved", tmp_path / "out"), tensors)


def test_missing_ranks_and_mixed_saves_are_named(tmp_path):
    saved = tmp_path / "saved"
    shutil.copytree(WRITTEN / "padded", saved)
    (saved / NAME.format(rank=1, world=3)).unlink()
    with pytest.raises(CheckpointError, match="lacks the files of 1 of 3 ranks: 1"):
        merged(saved, tmp_path / "out")
    write(saved, 2, {"a": torch.ones(3)})
    with pytest.raises(CheckpointError, match="holds the files of several saves"):
        merged(saved, tmp_path / "out")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"rank": 5}, "its rank or number of ranks"),
        ({"world_size": 9}, "its rank or number of ranks"),
        ({"shard_info": {}}, "its description of the slices is damaged"),
        ({"shard_info": [1]}, "its description of the slices is damaged"),
        ({"shard_info": {"": {"_fsdp_shard.a": {"_orig_size": [-3], "_orig_name": "a"}}}}, "a size"),
        ({"shard_info": {"": {"_fsdp_shard.a": {"_orig_size": [10**9], "_orig_name": "a"}}}}, "chunks cover 128"),
        (
            {"shard_info": {"": {"_fsdp_shard.a": {"_orig_size": [3], "_orig_name": "flat_param_0"}}}},
            "its description of the slices is damaged",
        ),
    ],
)
def test_damaged_descriptions_are_refused(tmp_path, said, words):
    write(tmp_path / "saved", 1, {"a": torch.ones(3)}, **said)
    with pytest.raises(CheckpointError, match=words):
        merged(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_list_of_names_in_many_places_is_refused(tmp_path):
    """A small file must not make gigabytes of names."""
    names = [f"parameter{number}" for number in range(3000)]
    flat = (names, [[1]] * 3000, [1] * 3000)
    entries = {f"u{number}._fsdp_shard.x": torch.zeros(3072) for number in range(60)}
    info = {
        f"u{number}": {"_fsdp_shard.x": {"_orig_size": [3000], "_orig_name": "flat_param_0"}}
        for number in range(60)
    }
    metadata = {
        "shard_info": info,
        "flatten_info": {f"u{number}.flat_param_0": flat for number in range(60)},
        "world_size": 1,
        "rank": 0,
    }
    folder = tmp_path / "saved"
    folder.mkdir()
    torch.save({"model": entries, "shard_metadata": metadata}, folder / NAME.format(rank=0, world=1))
    with pytest.raises(CheckpointError, match="more parameters than a file of its size can describe"):
        merged(folder, tmp_path / "out")
