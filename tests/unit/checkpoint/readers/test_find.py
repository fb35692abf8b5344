"""Finding the model's checkpoint from whatever folder a user points at."""

import json
import os

import pytest

from fsdplaunch.checkpoint.merge.merge import merge
from fsdplaunch.checkpoint.readers.open import AmbiguousError, find_model
from fsdplaunch.checkpoint.readers.rank_files import read_rank_files
from fsdplaunch.checkpoint.readers.xla_files import read_xla_files
from fsdplaunch.errors import CheckpointError, UsageError


@pytest.fixture
def model(dcp):
    return dcp.Draft().add("w", (4,))


@pytest.fixture
def optimizer(dcp):
    return dcp.Draft().add("state.w.exp_avg", (4,), top="optimizer")


@pytest.mark.parametrize(
    "place",
    [
        ".",
        "pytorch_model_fsdp_0",
        "pytorch_model_0",
        "checkpoint-2000/pytorch_model_fsdp_0",
        "run/checkpoint-2000/pytorch_model_fsdp_0",
        "weights of mine",
    ],
)
def test_model_is_found_below_the_folder_given(model, optimizer, place, tmp_path):
    folder = model.save(tmp_path / "x" / place)
    if place != ".":
        optimizer.save(folder.parent / "optimizer_0")
        (folder.parent / "scheduler.bin").write_bytes(b"")
        (folder.parent / "random_states_0.pkl").write_bytes(b"")
    result = merge(tmp_path / "x", tmp_path / "out")
    assert result.source == folder
    assert result.tensors == 1


def test_several_models_are_listed(model, tmp_path):
    for name in ("checkpoint-1000", "checkpoint-900"):
        model.save(tmp_path / name / "pytorch_model_fsdp_0")
    with pytest.raises(AmbiguousError, match=r"holds 2 models: .*checkpoint-900/py.*-1000/py") as caught:
        find_model(tmp_path)
    assert caught.value.hint == "give one of them"
    assert [path.parent.name for path in caught.value.candidates] == ["checkpoint-900", "checkpoint-1000"]


def test_links_to_a_checkpoint_are_the_same_checkpoint(model, tmp_path):
    folder = model.save(tmp_path / "run0" / "checkpoint-2000" / "pytorch_model_fsdp_0")
    (tmp_path / "run0" / "a-latest").symlink_to(tmp_path / "run0" / "checkpoint-2000")
    (tmp_path / "run0" / "loop").symlink_to(tmp_path / "run0")
    assert find_model(tmp_path / "run0") == folder
    model.save(tmp_path / "disk" / "saved")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "pytorch_model_fsdp_0").symlink_to(tmp_path / "disk" / "saved")
    assert find_model(tmp_path / "run") == tmp_path / "run" / "pytorch_model_fsdp_0"
    merge(tmp_path / "run", tmp_path / "out")


def test_an_unfinished_checkpoint_beside_a_finished_one_is_not_passed_over(model, tmp_path):
    model.save(tmp_path / "checkpoint-1000" / "pytorch_model_fsdp_0")
    unfinished = model.save(tmp_path / "checkpoint-2000" / "pytorch_model_fsdp_0")
    (unfinished / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"whose save did not finish: .*checkpoint-2000") as caught:
        find_model(tmp_path)
    assert caught.value.hint == f"give {tmp_path}/checkpoint-1000/pytorch_model_fsdp_0 itself"


def test_optimizer_is_taken_when_it_is_given_and_said_when_it_is_all_there_is(optimizer, tmp_path):
    folder = optimizer.save(tmp_path / "optimizer_0")
    assert find_model(folder) == folder
    with pytest.raises(CheckpointError, match="holds only an optimizer"):
        find_model(tmp_path)


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["__0_0.distcp", "__1_0.distcp"], r"data files but no \.metadata: the save did not finish"),
        (["__0.metadata", "__0_0.distcp"], "an index per rank"),
        (["model.safetensors", "config.json"], "is merged already"),
        (["model-00001-of-00002.safetensors", "model.safetensors.index.json"], "is merged already"),
        (["consolidated_rank_3.pth"], "one pickled file per rank"),
    ],
)
@pytest.mark.parametrize("below", [False, True])
def test_other_formats_are_named_with_what_can_be_done(names, match, below, tmp_path):
    folder = tmp_path / "step-1" if below else tmp_path
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=match) as caught:
        find_model(tmp_path)
    assert str(folder) in caught.value.message
    assert caught.value.hint


def test_unknown_folder_says_what_was_looked_for_and_what_is_there(tmp_path):
    (tmp_path / "x" / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "x" / "notes.txt").write_text("")
    for folder, there in (("x", "'notes.txt', 'sub/'"), ("x/sub/deep", "nothing")):
        with pytest.raises(CheckpointError, match=r"no \.metadata in it or up to 3 folders") as caught:
            find_model(tmp_path / folder)
        assert caught.value.hint == f"it holds {there}"


def test_missing_folder_shows_what_is_there_instead(tmp_path):
    (tmp_path / "checkpoint-1000").mkdir()
    with pytest.raises(UsageError, match="checkpoint-2000 does not exist") as caught:
        find_model(tmp_path / "checkpoint-2000")
    assert caught.value.hint == f"{tmp_path} holds 'checkpoint-1000'"


def test_a_file_is_answered_with_its_folder(model, tmp_path):
    folder = model.save(tmp_path / "ckpt")
    with pytest.raises(UsageError, match="is not a folder") as caught:
        find_model(folder / "__0_0.distcp")
    assert str(folder) in caught.value.hint


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_impossible_path_is_an_error_of_ours(name, tmp_path):
    with pytest.raises((UsageError, CheckpointError)):
        merge(tmp_path / name, tmp_path / "out")


def test_permission_errors_below_are_said(model, tmp_path, monkeypatch):
    model.save(tmp_path / "ckpt" / "pytorch_model_fsdp_0")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("fsdp_0"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(CheckpointError, match="fsdp_0 cannot be read: permission denied"):
        find_model(tmp_path / "ckpt")


def test_model_that_differs_from_its_manifest_is_refused(model, tmp_path):
    folder = model.save(tmp_path / "ckpt" / "pytorch_model_fsdp_0")
    sizes = {f"{folder.name}/{path.name}": path.stat().st_size for path in folder.iterdir()}
    manifest = {"complete": True, "files": {**sizes, "optimizer_0/.metadata": 5}}
    (tmp_path / "ckpt" / "fsdplaunch.json").write_text(json.dumps(manifest))
    assert find_model(tmp_path / "ckpt") == folder
    data = folder / "__0_0.distcp"
    data.write_bytes(data.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has \d+ bytes instead of \d+"):
        find_model(folder)
    data.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is missing"):
        find_model(tmp_path / "ckpt")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"files": 3}', "[" * 100_000, "\xff", '{"complete": false}', '{"step": 1}']
)
def test_manifest_that_is_not_one_or_of_an_unfinished_save_is_refused(model, text, tmp_path):
    folder = model.save(tmp_path / "ckpt" / "pytorch_model_fsdp_0")
    (tmp_path / "ckpt" / "fsdplaunch.json").write_bytes(text.encode("latin-1"))
    for given in (folder, folder.parent):
        with pytest.raises(CheckpointError, match=r"ckpt: its (manifest cannot be read|save did not finish)"):
            find_model(given)


def test_too_many_folders_are_refused_quickly(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdplaunch.checkpoint.readers.open.MAX_FOLDERS", 10)
    for number in range(20):
        (tmp_path / str(number)).mkdir()
    with pytest.raises(CheckpointError, match="more than 10 folders"):
        find_model(tmp_path)


@pytest.mark.parametrize("read", [read_rank_files, read_xla_files], ids=["rank", "xla"])
def test_files_that_have_gone_since_they_were_found_are_an_error(read, tmp_path):
    with pytest.raises(CheckpointError, match="was changed while it was read: its files have gone"):
        read(tmp_path)
