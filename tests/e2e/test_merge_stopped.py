"""A merge that is told to end leaves nothing behind and the checkpoint as it was."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp


def read_tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_signal_during_a_merge_removes_the_partial_result(number, tmp_path):
    # A conversion is slow enough to be met in its middle.
    dcp.save({"model": {"w": torch.ones(60_000_000)}}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    before = read_tree(tmp_path / "ckpt")
    command = [sys.executable, "-m", "fsdplaunch", "merge-weights", "ckpt", "out", "--dtype", "bf16", "--verify"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as merge:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob(".out.partial-*/model.safetensors")):
            assert merge.poll() is None, merge.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        merge.send_signal(number)
        assert merge.wait(30) == 128 + number
        assert b"Traceback" not in merge.stderr.read()
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    assert read_tree(tmp_path / "ckpt") == before
