"""A run on a torch that is newer than any tested: it goes on, and is told of it once."""

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import ROOT, clean_environ

COLD = True
# Says of itself that it is another version, and is the installed torch otherwise.
STAND_IN = """
import importlib, sys
sys.path = [place for place in sys.path if not place.endswith("made-up")]
del sys.modules["torch"]
importlib.import_module("torch").__version__ = "9.9.9"
"""
# What it does last is a collective, and no other thread gets Python's lock after that: gloo's has to free tensors.
SCRIPT = """
import os, sys, torch, fsdplaunch
torch.__version__ = "9.9.9"
sys.setswitchinterval(100)
for _ in range(2):
    fsdplaunch.prepare(torch.nn.Linear(4, 4))
if os.environ["RANK"] == "0":
    print("prepared")
"""
GLOO_LINE = "[Gloo] Rank"
"""The line of torch 2.9 and 2.10, which a torch that hides its version keeps."""
SENTENCE = "torch 9.9.9 is too new to have been tested"


def made_up(folder: Path) -> dict[str, str]:
    (folder / "made-up/torch").mkdir(parents=True)
    (folder / "made-up/torch/__init__.py").write_text(STAND_IN)
    (folder / "made-up/torch/version.py").write_text('__version__ = "9.9.9"\n')
    return {"PYTHONPATH": os.pathsep.join([str(folder / "made-up"), str(ROOT)])}


def without_gloo(output: str) -> list[str]:
    return [line for line in output.splitlines() if not line.startswith(GLOO_LINE)]


def test_launch_says_it_once_for_all_ranks(launch, tmp_path):
    options = ("--num-processes", "2", "--use-cpu", "--fsdp-auto-wrap-policy", "NO_WRAP")
    run = launch(SCRIPT, *options, plain=False, env=made_up(tmp_path))
    assert (run.code, without_gloo(run.stdout)) == (0, ["prepared"]), run.stderr
    assert (run.stdout + run.stderr).count(SENTENCE) == 1
    assert SENTENCE not in run.log(0, "stderr.log") + run.log(1, "stderr.log")


def test_prepare_says_it_once_where_torchrun_started_the_workers(tmp_path):
    (tmp_path / "t.py").write_text(SCRIPT + "torch.distributed.destroy_process_group()\n")
    environ = clean_environ() | {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "t.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, without_gloo(done.stdout)) == (0, ["prepared"]), done.stderr
    assert done.stderr.count(SENTENCE) == 1
