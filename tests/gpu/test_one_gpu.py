"""The CUDA-only paths, on however many GPUs there are: nccl, bf16, offload with pinned memory, the main job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys, torch, torch.distributed as dist, fsdplaunch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fsdplaunch.prepare(model, optimizer)
x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).cuda()
losses = []
for _ in range(10):
    loss = (model(x).float() - x).pow(2).mean()
    loss.backward()
    fsdplaunch.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
fsdplaunch.save_checkpoint("ckpt", model=model, optimizer=optimizer)
if dist.get_rank() == 0:
    parameter = next(iter(model.parameters()))
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    facts = {"losses": losses, "device": local.device.type, "dtype": str(parameter.dtype),
             "backend": str(dist.get_backend_config()), "visible": torch.cuda.device_count()}
    print("FACTS " + json.dumps(facts))
"""


def run(tmp_path: Path, *settings: str) -> dict:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "fsdplaunch", "launch", *options, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "FACTS " in line)
    return json.loads(line.partition("FACTS ")[2])


def plain_losses() -> list[float]:
    """The same training without fsdplaunch, on one GPU."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)]
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).cuda()
    losses = []
    for _ in range(10):
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("wrap", ["SIZE_BASED_WRAP", "NO_WRAP"])
def test_losses_on_gpus_equal_plain_training(tmp_path, version, wrap):
    settings = [f"fsdp_version={version}", f"fsdp_auto_wrap_policy={wrap}"]
    settings += ["fsdp_min_num_params=1000"] if wrap == "SIZE_BASED_WRAP" else []
    facts = run(tmp_path, *settings)
    assert facts["losses"] == pytest.approx(plain_losses(), abs=1e-5)
    assert facts["device"] == "cuda"
    assert "nccl" in facts["backend"]
    assert "gloo" in facts["backend"]


@pytest.mark.parametrize("version", [1, 2])
def test_bf16_keeps_fp32_shards_and_learns(tmp_path, version):
    facts = run(tmp_path, f"fsdp_version={version}", "mixed_precision=bf16", "fsdp_auto_wrap_policy=NO_WRAP")
    assert facts["dtype"] == "torch.float32"
    assert facts["losses"][-1] < facts["losses"][0]
    assert facts["losses"] == pytest.approx(plain_losses(), rel=0.05)


@pytest.mark.parametrize("version", [1, 2])
def test_offloaded_parameters_stay_in_host_memory(tmp_path, version):
    facts = run(tmp_path, f"fsdp_version={version}", "fsdp_offload_params=true", "fsdp_auto_wrap_policy=NO_WRAP")
    assert facts["device"] == "cpu"
    assert facts["losses"] == pytest.approx(plain_losses(), abs=1e-5)


def test_main_job_on_gpus(tmp_path):
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
