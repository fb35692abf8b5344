"""Run the command line as a user does: a process of its own, in an empty folder."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Return a function that runs `fsdplaunch ARGS` in tmp_path, without any of the caller's configuration."""
    prefixes = ("FSDP_", "FSDPLAUNCH_", "ACCELERATE_", "PARALLELISM_CONFIG_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}

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
