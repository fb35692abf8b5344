"""The options of `merge-weights` as a user types them."""

import json
import os
import sys
from pathlib import Path

import pexpect
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of three weights in a folder of its own."""
    state = {"embed.weight": torch.ones(4, 2), "layers.0.w": torch.full((3,), 1.5), "head.bias": torch.zeros(4)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    return tmp_path / "ckpt"


def test_merge_weights_takes_dtype_patterns_and_names(cli, checkpoint, tmp_path):
    options = ["--dtype", "bf16", "--only", "embed", "--only", "layers.*", "--rename", "layers=h", "--json"]
    done = cli("merge-weights", "ckpt", "out", *options)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["excluded"], told["dtypes"]) == (["model.head.bias"], {"bfloat16": 2})
    assert told["renamed"] == [["layers.0.w", "h.0.w"]]
    found = load_file(tmp_path / "out/model.safetensors")
    assert sorted(found) == ["embed.weight", "h.0.w"]
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_merge_weights_copies_the_model_folder_and_names_tied_weights(cli, tmp_path):
    same = torch.ones(4, 2)
    state = {"model.embed_tokens.weight": same, "lm_head.weight": same.clone()}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    done = cli("merge-weights", "ckpt", "out", "--copy-from", "base")
    assert done.returncode == 0, done.stderr
    assert "tied, written once: lm_head.weight is model.embed_tokens.weight" in done.stderr
    assert "copied config.json" in done.stderr
    assert sorted(load_file(tmp_path / "out/model.safetensors")) == ["model.embed_tokens.weight"]
    done = cli("merge-weights", "ckpt", "both", "--keep-tied", "--json")
    assert json.loads(done.stdout)["tied"] == []
    assert sorted(load_file(tmp_path / "both/model.safetensors")) == sorted(state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dtype", "int4"], ["dtype 'int4' is not known", "bf16, fp16, fp32"]),
        (["--format", "onnx"], ["--format 'onnx' is not known"]),
        (["--rename", "layers"], ["--rename 'layers' is not OLD=NEW", "--rename model.language_model=model"]),
        (["--dtype", "bf16", "--unsafe-serialization"], ["dtype works only in a merge to safetensors"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else None,
)
def test_wrong_merge_options_end_with_2_and_write_nothing(cli, checkpoint, tmp_path, options, said):
    done = cli("merge-weights", "ckpt", "out", *options)
    assert done.returncode == 2, done.stderr
    for text in said:
        assert text in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_dry_run_checks_the_output_and_writes_nothing(cli, checkpoint, tmp_path):
    done = cli("merge-weights", "ckpt", "out", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in done.stdout
    done = cli("merge-weights", "ckpt", "ckpt/out", "--dry-run")
    assert done.returncode == 2
    assert "lies inside the checkpoint" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def several(folder: Path) -> None:
    for number in (900, 1000):
        state = {"w": torch.full((2,), float(number))}
        dcp.save(
            {"model": state}, checkpoint_id=folder / f"run/checkpoint-{number}/pytorch_model_fsdp_0", no_dist=True
        )


@pytest.mark.parametrize(("answer", "status"), [("2", 0), ("7", 2)])
def test_several_models_are_asked_about_on_a_terminal(cli, answer, status, tmp_path):
    several(tmp_path)
    if answer == "7":  # nobody can be asked either
        done = cli("merge-weights", "run", "out")
        assert (done.returncode, "run holds 2 models: run/checkpoint-900/" in done.stderr) == (2, True)
    env = {key: value for key, value in os.environ.items() if key != "CI"}
    command = ["-m", "fsdplaunch", "merge-weights", "run", "out"]
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    child = pexpect.spawn(sys.executable, command, cwd=tmp_path, env=env, timeout=60, encoding="utf-8")
    child.expect(r"1  run/checkpoint-900/.*2  run/checkpoint-1000/")
    child.expect("which one")
    child.sendline(answer)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == status
    if not status:
        assert load_file(tmp_path / "out/model.safetensors")["w"].tolist() == [1000, 1000]


def test_format_torch_writes_a_file_that_loads_without_running_code(cli, checkpoint, tmp_path):
    done = cli("merge-weights", "ckpt", "out", "--format", "torch", "--remove-checkpoint-dir", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["removed"] is True
    assert not checkpoint.exists()
    found = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    assert found["layers.0.w"].tolist() == [1.5, 1.5, 1.5]
