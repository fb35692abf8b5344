"""Run the command line as a user does: a process of its own, in an empty folder."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]
FROM_OUTSIDE = ("FSDP", "ACCELERATE_", "PARALLELISM_", "SLURM", "OMPI_", "PMI_", "TORCHELASTIC_")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in an empty folder, without any of the caller's configuration."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(FROM_OUTSIDE)]:
        monkeypatch.delenv(name)


@pytest.fixture
def cli(tmp_path: Path, own_folder: None) -> Cli:
    """Return a function that runs `fsdplaunch ARGS` in tmp_path."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}

    def run(*arguments: str, before: Sequence[str] = (), **env: str) -> subprocess.CompletedProcess[str]:
        command = [*before, sys.executable, "-m", "fsdplaunch", *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environ | env,
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )

    return run
