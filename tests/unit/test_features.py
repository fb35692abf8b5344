"""Features beside the road: a package without their folders does everything else, and says what it lacks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fsdplaunch
from fsdplaunch.features import FOLDERS

PACKAGE = Path(fsdplaunch.__file__).parent
CODE = """
import fsdplaunch, fsdplaunch.runtime.bootstrap
from fsdplaunch.cli.app import run
from fsdplaunch.errors import LaunchError
from fsdplaunch.features import KUBERNETES, LAYERS, WARM_CLIENT, XLA, feature
from fsdplaunch.runtime.sharding.shard import shard_model

assert run(["--help"]) == 0
assert run(["launch", "--dry-run", "train.py"]) == 0
for name in ("prepare", "clip_grad_norm_", "no_sync", "save_checkpoint", "load_checkpoint", "describe"):
    getattr(fsdplaunch, name)

for command in (["tune", "train.py"], ["estimate", "8b"], ["check", "--compare", "train.py"]):
    assert run(command) == 1
for use in (
    lambda: feature(WARM_CLIENT), lambda: feature(KUBERNETES), lambda: feature(XLA), lambda: feature(LAYERS),
    lambda: fsdplaunch.context_parallel,
):
    try:
        use()
    except LaunchError as error:
        print(f"error: {error.message}", file=__import__("sys").stderr)
"""


def test_a_package_without_them_does_the_rest_and_names_each_when_asked(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "fsdplaunch", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in FOLDERS:
        place = tmp_path.joinpath(*folder.split("."))
        shutil.rmtree(place) if place.is_dir() else place.with_suffix(".py").unlink()
    (tmp_path / "train.py").write_text("")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [
        f"error: this installation is without {what}: there is no {folder}" for folder, what in FOLDERS.items()
    ]
