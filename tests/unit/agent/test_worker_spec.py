"""What each worker of a node gets."""

import subprocess
import sys
from pathlib import Path

import pytest

from fsdplaunch.agent.main import preload_lists, split
from fsdplaunch.agent.worker_spec import make_worker_spec
from fsdplaunch.config.schema.config import Config, LaunchSection

PYTHON = ["-m", "fsdplaunch.runtime.bootstrap", "t.py", "--x"]


def made(config=None, command=PYTHON, workers=2):
    return make_worker_spec(config or Config(), command, run_dir=Path("/r"), workers=workers, is_reported=True)


def test_options_end_where_the_workers_command_begins():
    assert split(["--a=1", "--b=2", *PYTHON]) == (["--a=1", "--b=2"], PYTHON)
    assert split(["--a=1", "./run.sh", "--a=1"]) == (["--a=1"], ["./run.sh", "--a=1"])


def test_python_is_forked_warm_unless_the_preload_list_is_empty():
    warm = made()
    assert (warm.cold, warm.command) == (False, ("t.py", "--x"))
    fresh = (sys.executable, "-u", *PYTHON)
    assert warm.cold_command == fresh
    cold = made(Config(launch=LaunchSection(preload=())))
    assert (cold.cold, cold.command, cold.cold_command) == (True, fresh, fresh)


def test_program_is_always_executed():
    spec = made(command=["./run.sh", "-m", "x"])
    assert (spec.cold, spec.command, spec.cold_command) == (True, ("./run.sh", "-m", "x"), ("./run.sh", "-m", "x"))


def test_sharding_is_preloaded_for_runs_that_shard():
    first, then = preload_lists(Config(), PYTHON)
    assert first == ("torch", "torch.distributed")
    assert "fsdplaunch.runtime.torch_internals.compiler_import" in then
    _, plain = preload_lists(
        Config(distributed_type="MULTI_GPU", launch=LaunchSection(preload=("torch", "x"))), PYTHON
    )
    assert plain == ("fsdplaunch.runtime.bootstrap", "torch", "x")
    assert preload_lists(Config(), ["./run.sh"]) == ((), ())


def test_compiler_import_imports_torchs_compiler():
    """The first optimizer would import it in every worker, most of a second each."""
    code = """
import sys, torch
before = "torch._dynamo" in sys.modules
import fsdplaunch.runtime.torch_internals.compiler_import
print(before, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"


@pytest.mark.parametrize(
    ("visible", "own"),
    [("5,7", ("5", "7")), (None, ("0", "1")), ("", ("", "")), ("GPU-a, GPU-b", ("GPU-a", "GPU-b"))],
)
def test_virtual_local_rank_shows_each_worker_its_own_gpu(monkeypatch, visible, own):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    spec = made(Config(launch=LaunchSection(virtual_local_rank=True)))
    assert spec.variables == {
        rank: {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": name} for rank, name in enumerate(own)
    }
