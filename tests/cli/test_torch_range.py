"""A torch outside of the tested range, made up: one sentence with both numbers, before anything starts."""

import os
from pathlib import Path

import pytest

from fsdplaunch.probe.torch_version import requirement

ROOT = Path(__file__).resolve().parents[2]
TESTED = "fsdplaunch is tested with torch 2."
OLD, NEW = "2.5.1+cpu", "9.9.9"
SENTENCE = {OLD: f"torch {OLD} is too old: {TESTED}", NEW: f"torch {NEW} is too new to have been tested: {TESTED}"}


@pytest.fixture
def with_torch(cli, tmp_path):
    """Run a command where `import torch` would find another version."""
    (tmp_path / "t.py").write_text("")

    def run(version, *arguments):
        home = tmp_path / "made-up"
        (home / "torch").mkdir(parents=True)
        (home / "torch/__init__.py").write_text("raise SystemExit('torch was imported')\n")
        (home / "torch/version.py").write_text(f"__version__ = '{version}'\n")
        path = os.pathsep.join(filter(None, [str(home), str(ROOT), os.environ.get("PYTHONPATH")]))
        return cli(*arguments, PYTHONPATH=path)

    return run


@pytest.mark.parametrize(
    "command",
    [
        ("launch", "t.py"),
        ("launch", "--num-machines", "2", "--machine-rank", "0", "--check-only", "t.py"),
        ("check", "t.py"),
    ],
    ids=" ".join,
)
def test_too_old_is_one_sentence_and_exit_status_3(with_torch, tmp_path, command):
    done = with_torch(OLD, *command)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count(SENTENCE[OLD]) == done.stderr.count("error:") == 1
    assert f"hint:  pip install '{requirement()}'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_too_new_is_a_note_before_a_check(with_torch):
    done = with_torch(NEW, "launch", "--check-only", "t.py")
    assert done.returncode == 0
    assert done.stderr.count(SENTENCE[NEW]) == 1
    assert done.stderr.startswith("note: ")
    assert "ready: t.py can start" in done.stderr


def test_dry_run_shows_the_plan_and_says_it_too(with_torch):
    done = with_torch(OLD, "launch", "--num-machines", "2", "--machine-rank", "0", "--dry-run", "t.py")
    assert done.returncode == 0
    assert done.stderr.count(SENTENCE[OLD]) == 1
    assert "fsdplaunch.runtime.bootstrap" in done.stdout


@pytest.mark.parametrize("route", [("--slurm",), ("--kubernetes", "--kubernetes.image", "x"), ("--hosts", "a,b")])
def test_a_run_that_starts_elsewhere_is_not_judged_by_the_torch_here(with_torch, route):
    done = with_torch(OLD, "launch", *route, "--dry-run", "t.py")
    assert done.returncode == 0, done.stderr
    assert "too old" not in done.stderr
