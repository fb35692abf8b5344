"""Training on GPUs: equal to the unsharded run there, with every feature that only a GPU has."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.split_models import PLAIN_PLAN

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
ROOT = Path(__file__).parents[2]
RANKS = min(torch.cuda.device_count(), 2)


def run(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    script = str(Path(__file__).parent / "train_on_gpu.py")
    command = [*torchrun, "-m", "fsdplaunch.runtime.bootstrap", script, json.dumps(fields), str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


EXACT: dict[str, dict[str, Any]] = {
    "1": {"fsdp_version": 1},
    "1 flat": {"fsdp_version": 1, "use_orig_params": False},
    "1 sharded files": {"fsdp_version": 1, "state_dict_type": "SHARDED_STATE_DICT"},
    "1 offloaded": {"fsdp_version": 1, "cpu_offload": True},
    "2": {"fsdp_version": 2},
    "2 whole files": {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"},
    "2 offloaded": {"fsdp_version": 2, "cpu_offload": True},
    "2 prefetching": {"fsdp_version": 2, "forward_prefetch": True},
    "2 recomputing": {
        "fsdp_version": 2,
        "activation_checkpointing": True,
        "activation_checkpointing_offload": True,
    },
}


@pytest.mark.parametrize("case", EXACT)
def test_losses_on_gpus_equal_unsharded_and_go_on_after_loading(tmp_path: Path, case: str) -> None:
    result = run(EXACT[case], tmp_path)
    assert result["sharded"] == pytest.approx(result["alone"], abs=1e-4)
    assert result["resumed"] == pytest.approx(result["sharded"][5:], abs=1e-5)
    assert "nccl" in result["backend"]
    assert result["device"] == ("cpu" if EXACT[case].get("cpu_offload") else "cuda")


@pytest.mark.parametrize("version", [1, 2])
def test_bf16_on_gpus_learns_as_fp32_does(tmp_path: Path, version: int) -> None:
    result = run({"fsdp_version": version, "mixed_precision_policy": "bf16"}, tmp_path)
    assert result["sharded"] == pytest.approx(result["alone"], abs=0.05)
    assert result["resumed"] == pytest.approx(result["sharded"][5:], abs=1e-2)


AXES = {
    "layers split": {
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "FSDPLAUNCH_SHARDING_TENSOR_PARALLEL_PLAN": json.dumps(PLAIN_PLAN),
    },
    "sequences split": {"PARALLELISM_CONFIG_CP_SIZE": "2"},
}


@pytest.mark.skipif(RANKS < 2, reason="layers and sequences are split over two GPUs")
@pytest.mark.parametrize("words", AXES)
def test_split_layers_and_sequences_on_gpus_compute_what_one_does(words: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    script = str(Path(__file__).parent / "split_on_gpu.py")
    env = os.environ | {"PYTHONPATH": str(ROOT), "FSDP_VERSION": "2"} | AXES[words]
    command = [*torchrun, "-m", "fsdplaunch.runtime.bootstrap", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["split"] == pytest.approx(result["alone"], abs=1e-3)
    assert any(words in line for line in result["lines"])


def test_main_job_on_gpus(tmp_path: Path) -> None:
    def fsdplaunch(*arguments: str) -> str:
        command = [sys.executable, "-m", "fsdplaunch", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    fsdplaunch("config", "--yes")
    said = fsdplaunch("launch", str(ROOT / "scripts/examples/train_lm.py"), "--steps", "60")
    fsdplaunch("merge-weights", "checkpoints/lm", "merged")
    assert (tmp_path / "merged/model.safetensors").exists()
    after = float(said.rpartition("evaluation loss after training: ")[2].split()[0])
    assert after < 3.5
