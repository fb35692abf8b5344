"""Checkpoints of PyTorch/XLA load on another number of processes; nothing here has torch_xla.

What a process holds of a model is taken from files that torch_xla 2.9.0 wrote for each of three ranks.
"""

import shutil

import pytest
import torch

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.saving.model_and_optimizer import read_sharded
from fsdplaunch.runtime.xla.stored import (
    NAMES,
    OwnSlice,
    check_fit,
    held_pieces,
    open_weights,
    parameter_shapes,
    read_optimizer,
    values_of,
)
from tests.unit.checkpoint.readers.test_xla_files import WRITTEN, cut, model, write

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
            name: values_of(held_pieces(name, shapes[name], metadata), stored, shapes[name], tensor.dtype)
            for name, tensor in state.items()
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
    with pytest.raises(CheckpointError, match="files of single ranks that PyTorch/XLA sharded") as caught:
        read_sharded({"model": {}}, WRITTEN / "padded", strict=True)
    assert "merge-weights" in caught.value.hint


FULL = {"a": torch.arange(300.0).view(100, 3), "b": torch.tensor(7.0), "c": torch.arange(5.0)}


def rows(tensor, world):
    part = -(-tensor.shape[0] // world)
    padded = torch.cat([tensor, tensor.new_zeros(part * world - tensor.shape[0], *tensor.shape[1:])])
    return list(padded.split(part))


def slices(name, form, world):
    """A tensor's slices, one per process."""
    if form == "full":
        return [FULL[name]] * world
    by_rows = form == "rows" and FULL[name].dim() > 1
    return rows(FULL[name], world) if by_rows else cut(FULL[name], world)


def save_optimizer(folder, form, world, **others):
    processes = 1 if form == "full" else world
    for rank in range(processes):
        values = {
            place: {"step": torch.tensor(3.0), "exp_avg": slices(name, form, world)[rank], "tag": 1} | others
            for place, name in enumerate(FULL)
        }
        state = {"state": values, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}
        file = {"optimizer": state, NAMES: [[name] for name in FULL]}
        torch.save(file, folder / f"rank{rank}-of-{processes}-optimizer.bin")


def held_by(rank, form, world):
    count, place = (1, 0) if form == "full" else (world, rank)
    return [
        OwnSlice(
            names=(name,),
            full=tuple(FULL[name].shape),
            shape=tuple(slices(name, form, world)[rank].shape),
            rank=place,
            world=count,
        )
        for name in FULL
    ]


@pytest.mark.parametrize(("form", "world"), [("full", 1), ("flat", 1), ("flat", 3), ("rows", 3), ("rows", 4)])
def test_optimizer_state_is_cut_anew(form, world, tmp_path):
    save_optimizer(tmp_path, form, world)
    for own_form, own_world in (("full", 1), ("flat", 1), ("flat", 2), ("flat", 3), ("rows", 2), ("rows", 3)):
        for rank in range(own_world):
            state = read_optimizer(tmp_path, held_by(rank, own_form, own_world))
            assert state["param_groups"] == [{"lr": 0.1, "params": [0, 1, 2]}]
            for place, name in enumerate(FULL):
                found = state["state"][place]
                assert (found["step"], found["tag"]) == (torch.tensor(3.0), 1)
                assert torch.equal(found["exp_avg"], slices(name, own_form, own_world)[rank]), (own_form, name)


def test_another_optimizer_is_refused(tmp_path):
    own = held_by(0, "flat", 2)
    with pytest.raises(CheckpointError, match="holds no optimizer that PyTorch/XLA's processes saved"):
        read_optimizer(tmp_path, own)
    save_optimizer(tmp_path, "flat", 3, exp_avg_row=torch.ones(4))
    with pytest.raises(CheckpointError, match="exp_avg_row of 'a' has 12 values of 300"):
        read_optimizer(tmp_path, own)
    with pytest.raises(CheckpointError, match="of an optimizer of 3 parameters, this one has 2"):
        read_optimizer(tmp_path, own[:2])
    with pytest.raises(CheckpointError, match="has 'a' where this optimizer trains 'c'"):
        read_optimizer(tmp_path, own[::-1])
    (tmp_path / "rank1-of-3-optimizer.bin").unlink()
    with pytest.raises(CheckpointError, match="lacks the files of 1 of 3 ranks: 1"):
        read_optimizer(tmp_path, own)
