"""Checkpoints of PyTorch/XLA load on another number of processes; nothing here has torch_xla.

What a process holds of a model is taken from files that torch_xla 2.9.0 wrote for each of three ranks.
"""

import shutil

import pytest
import torch
import torch.distributed as dist

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.saving.model_and_optimizer import read_sharded
from fsdplaunch.runtime.xla.stored import (
    NAMES,
    check_fit,
    open_weights,
    parameter_shapes,
    read_optimizer,
    values_of,
)
from tests.unit.checkpoint.readers.test_xla_files import WRITTEN, model, write

FORMS = ("padded", "flattened", "by_dim_0")


def saved_by(how, folder):
    """A checkpoint of `model()`, written by three ranks in a form, by any number of ranks, or in full."""
    if how in FORMS:
        shutil.copytree(WRITTEN / how, folder / "pytorch_model_fsdp_0")
    elif isinstance(how, int):
        write(folder / "pytorch_model_fsdp_0", how, model())
    else:
        torch.save(model(), folder / "pytorch_model_fsdp.bin")
    return folder


def loaded(folder, state, metadata):
    """What a process with such a state dict reads."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    with open_weights(folder, 0) as stored:
        check_fit(stored, parameter_shapes(shapes, metadata))
        return {
            name: values_of(name, shapes[name], tensor.dtype, metadata, stored) for name, tensor in state.items()
        }


def same(one, other):
    return sorted(one) == sorted(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("how", [*FORMS, 1, 2, 5, "full"])
def test_any_save_loads_into_any_wrapper(how, tmp_path):
    folder = saved_by(how, tmp_path)
    assert same(loaded(folder, model(), None), model())
    for form in FORMS:
        for rank in range(3):
            file = torch.load(WRITTEN / form / f"rank{rank}-of-3-pytorch_model.bin", weights_only=True)
            assert same(loaded(folder, file["model"], file["shard_metadata"]), file["model"]), (form, rank)


def test_sizes_are_read_as_a_wrapper_in_memory_has_them(tmp_path):
    write(tmp_path / "own", 2, model())
    file = torch.load(tmp_path / "own" / "rank1-of-2-pytorch_model.bin", weights_only=True)
    sizes = [info["_orig_size"] for info in file["shard_metadata"]["shard_info"][""].values()]
    assert {type(size) for size in sizes} == {torch.Size}
    assert same(loaded(saved_by("padded", tmp_path), file["model"], file["shard_metadata"]), file["model"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("embed.weight"), r"another model: it has 'embed\.weight'"),
        (lambda state: state.update(more=torch.ones(2)), "another model: it lacks 'more'"),
        (
            lambda state: state.update({"embed.weight": torch.ones(2, 6)}),
            r"'embed\.weight' has shape \[7, 6\] in .*, \[2, 6\] in the model",
        ),
    ],
)
def test_another_model_is_refused(change, words, tmp_path):
    state = model()
    change(state)
    with pytest.raises(CheckpointError, match=words):
        loaded(saved_by("padded", tmp_path), state, None)


def test_a_folder_without_the_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no model 0: neither pytorch_model_fsdp\.bin nor"):
        loaded(tmp_path, model(), None)


def test_torchs_fsdp_is_told_how_to_read_them():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(CheckpointError, match="files of single ranks that PyTorch/XLA sharded") as caught:
            read_sharded({"model": {}}, WRITTEN / "padded", strict=True)
    finally:
        dist.destroy_process_group()
    assert "merge-weights" in caught.value.hint


def test_an_optimizer_is_read_by_as_many_processes_as_saved_it(tmp_path):
    state = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"optimizer": state, NAMES: [["a", [2]], ["b", "c", [9]]]}, tmp_path / "rank0-of-2-optimizer.bin")
    own = [["a", [2]], ["b", "c", [9]]]
    assert read_optimizer(tmp_path, "rank0-of-2-optimizer.bin", own) == state
    with pytest.raises(CheckpointError, match=r"holds no rank0-of-4-optimizer\.bin, but rank0-of-2") as caught:
        read_optimizer(tmp_path, "rank0-of-4-optimizer.bin", own)
    assert "load on as many processes as saved it" in caught.value.hint
    with pytest.raises(CheckpointError, match="is from an optimizer of other parameters, or of another order"):
        read_optimizer(tmp_path, "rank0-of-2-optimizer.bin", own[::-1])
