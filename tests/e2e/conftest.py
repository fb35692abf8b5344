"""The installed command, run as a user runs it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]


def clean_environ() -> dict[str, str]:
    """The caller's environment without configuration, GPUs or a width that depends on the terminal."""
    prefixes = ("FSDP_", "FSDPLAUNCH_", "ACCELERATE_", "PARALLELISM_CONFIG_", "TORCHELASTIC_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}


@pytest.fixture
def fsdplaunch(tmp_path: Path) -> Run:
    """Return a function that runs `fsdplaunch ARGS` in tmp_path."""

    def run(*arguments: str | Path, timeout: float = 180, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "fsdplaunch", *map(str, arguments)],
            cwd=tmp_path,
            env=clean_environ() | env,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.fixture
def examples() -> Path:
    """The folder with the example scripts."""
    return ROOT / "scripts" / "examples"
