"""Features beside the road: a package without their folders does everything else, and says what it lacks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fsdplaunch
from fsdplaunch.features import FOLDERS

PACKAGE = Path(fsdplaunch.__file__).parent
CODE = """
import fsdplaunch, fsdplaunch.runtime.bootstrap
from fsdplaunch.cli.app import run
from fsdplaunch.errors import LaunchError
from fsdplaunch.features import KUBERNETES, WARM_CLIENT, XLA, feature
from fsdplaunch.runtime.sharding.shard import shard_model

assert run(["--help"]) == 0
assert run(["launch", "--dry-run", "train.py"]) == 0
assert run(["config", "--where", "cpu", "--yes", "--output", "written.yaml"]) == 0
for name in ("prepare", "clip_grad_norm_", "no_sync", "save_checkpoint", "load_checkpoint", "describe"):
    getattr(fsdplaunch, name)

for command in (
    ["tune", "train.py"], ["estimate", "8b"], ["check", "--compare", "train.py"], ["watch"],
):
    assert run(command) == 1
for use in (
    lambda: feature(WARM_CLIENT), lambda: feature(KUBERNETES), lambda: feature(XLA),
    lambda: fsdplaunch.context_parallel,
):
    try:
        use()
    except LaunchError as error:
        print(f"error: {error.message}", file=__import__("sys").stderr)
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """A folder with a copy of the package that lacks the features, and a script."""
    folder = tmp_path_factory.mktemp("without")
    shutil.copytree(PACKAGE, folder / "fsdplaunch", ignore=shutil.ignore_patterns("__pycache__"))
    for feature in FOLDERS:
        place = folder.joinpath(*feature.split("."))
        shutil.rmtree(place) if place.is_dir() else place.with_suffix(".py").unlink()
    (folder / "train.py").write_text("print('hello')\n")
    return folder


def test_a_package_without_them_does_the_rest_and_names_each_when_asked(without):
    environ = {**os.environ, "PYTHONPATH": str(without), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", CODE], cwd=without, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [
        f"error: this installation lacks {what}: {folder} is missing" for folder, what in FOLDERS.items()
    ]


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
    assert "error: this installation lacks" in done.stderr
    assert "Traceback" not in done.stderr
