"""The main job: configure, train sharded, checkpoint, merge, and use the merged weights in plain PyTorch."""

import re
import subprocess
import sys

import pytest
from safetensors import safe_open

from fsdplaunch.checkpoint.merge.merge import merge_fsdp_weights


def loss_after(text: str, words: str) -> float:
    found = re.search(rf"{words}: ([0-9.]+)", text)
    assert found, text
    return float(found[1])


def test_main_job_end_to_end(fsdplaunch, examples, tmp_path):
    done = fsdplaunch("config", "--yes")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fsdp.yaml").exists()

    done = fsdplaunch("launch", examples / "train_lm.py", "--steps", "40")
    assert done.returncode == 0, done.stderr
    before = loss_after(done.stdout, "evaluation loss before training")
    after = loss_after(done.stdout, "evaluation loss after training")
    assert 5.4 < before < 5.8
    assert after < 3.2
    assert "4 x Block" in done.stderr

    done = fsdplaunch("merge-weights", "checkpoints/lm", "merged")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "merged").iterdir()] == ["model.safetensors"]

    command = [sys.executable, str(examples / "generate.py"), "merged", "--length", "40"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert abs(loss_after(done.stdout, "evaluation loss of the merged weights") - after) < 1e-4
    assert "def " in done.stdout

    merge_fsdp_weights(tmp_path / "checkpoints", tmp_path / "again")  # the Python door, from a folder above
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        tmp_path / "merged/model.safetensors"
    ).read_bytes()
    with safe_open(tmp_path / "merged/model.safetensors", "pt") as file:
        assert file.get_slice("head.weight").get_shape() == [256, 128]


BY_ITSELF = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard

def main():
    model = nn.Linear(4, 4)
    {line}

main()  # the model is garbage by now
"""
NEVER = "train.py ended without sharding a model"
ENDS = {
    "nothing": ("print('trained alone')", NEVER),
    "os._exit": ("import os; os._exit(0)", "without sharding a model"),
    "fully_shard": (BY_ITSELF.format(line="fully_shard(model, mesh=init_device_mesh('cpu', (2,)))"), ""),
    "FSDP1": (BY_ITSELF.format(line="FSDP(model, device_id=torch.device('cpu'))"), ""),
}


@pytest.mark.parametrize("case", ENDS)
def test_script_that_shards_nothing_fails_with_one_sentence(fsdplaunch, tmp_path, case):
    text, said = ENDS[case]
    (tmp_path / "train.py").write_text(text)
    done = fsdplaunch("launch", "--use-cpu", "train.py")
    assert done.returncode == bool(said), done.stderr
    assert said in done.stderr
    assert NEVER not in said or "fsdplaunch.prepare" in done.stderr
    assert "Traceback" not in done.stderr
