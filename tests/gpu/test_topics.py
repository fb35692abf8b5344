"""The topics of `scripts/gpu_check`, each a test where there are GPUs for it; and that the checks work without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.topics import ROOT, TOPICS, Topic, reason_to_skip, run_topic

torch = pytest.importorskip("torch", reason="needs torch")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="needs a CUDA device; torch sees none here")
@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_on_gpus(topic: Topic, tmp_path: Path) -> None:
    if reason := reason_to_skip(topic, GPUS):
        pytest.skip(reason)
    run_topic(topic, GPUS, tmp_path / "topic")


@pytest.mark.skipif(GPUS > 0, reason="the topics themselves are run here")
def test_gpu_check_runs_its_topics_and_writes_what_it_found(tmp_path: Path) -> None:
    topics = ["doctor", "a plain script", "which GPU"]
    only = [word for topic in topics for word in ("--only", topic)]
    command = [
        sys.executable,
        str(ROOT / "scripts" / "gpu_check"),
        "--without-gpu",
        "--work",
        str(tmp_path),
        *only,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [each["topic"] for each in found["topics"]] == [topic.name for topic in TOPICS if topic.name in topics]
    verdicts = {each["topic"]: each["verdict"] for each in found["topics"]}
    assert verdicts == {"doctor": "ok", "which GPU": "skipped", "a plain script": "ok"}
    assert found["torch"] == torch.__version__
    assert len(done.stdout.splitlines()) == len(topics) + 2  # the machine, a line each, the end


@pytest.mark.skipif(GPUS > 0, reason="torch sees GPUs here")
def test_gpu_check_without_a_gpu_ends_with_3_and_says_why(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check"), "--work", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 3
    assert "torch sees no GPU" in done.stderr
    assert not (tmp_path / "gpu_check.json").exists()


def test_gpu_check_names_its_topics_where_one_is_unknown(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check"), "--without-gpu", "--work", str(tmp_path)]
    done = subprocess.run([*command, "--only", "fsdp3"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no topic is called fsdp3" in done.stderr
    assert "  FSDP2\n" in done.stderr
