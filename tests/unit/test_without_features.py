"""A package that was built without a feature does everything else, and says so where the feature is asked for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fsdplaunch

FEATURES = ("warm", "launch/schedulers/kubernetes.py")


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """A folder with a copy of the package that lacks the features, and a script."""
    folder = tmp_path_factory.mktemp("without")
    package = folder / "fsdplaunch"
    shutil.copytree(Path(fsdplaunch.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FEATURES:
        path = package / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "train.py").write_text("print('hello')\n")
    return folder


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "fsdplaunch", *words]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_launch_needs_none_of_them(without):
    done = run(without, "launch", "--cpu", "--num-processes", "1", "--allow-unsharded", "train.py")
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("launch", "--cpu", "--keep-warm", "60", "train.py"),
        ("launch", "--kubernetes", "--dry-run", "--set", "kubernetes.image=x", "train.py"),
        ("warm",),
    ],
    ids=["warm launch", "kubernetes", "warm"],
)
def test_who_asks_for_one_is_told(without, words):
    done = run(without, *words)
    assert done.returncode != 0
    assert "was built without" in done.stderr
    assert "Traceback" not in done.stderr
