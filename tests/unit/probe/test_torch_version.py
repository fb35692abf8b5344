"""The range of torch that is declared, and what is said outside of it."""

import importlib.metadata
import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fsdplaunch.errors import EXIT_MACHINE, MachineError
from fsdplaunch.probe import torch_version
from fsdplaunch.probe.torch_version import NEWEST, OLDEST, installed, mismatch, parse, requirement

ROOT = Path(__file__).resolve().parents[3]


def test_pyproject_declares_the_tested_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirement() in project["dependencies"]


def test_the_version_that_a_clone_installs_is_inside():
    text = (ROOT / "scripts/constraints.txt").read_text()
    (pinned,) = [line for line in text.splitlines() if line.startswith("torch==")]
    assert mismatch(pinned.removeprefix("torch==")) is None


def test_the_campaign_tries_both_ends():
    path = str(ROOT / "scripts/campaigns/torch_versions")
    tried = [parse(version) for version in runpy.run_path(path)["VERSIONS"]]
    assert (tried[0], tried[-1]) == (OLDEST, NEWEST)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.13.0+cu132", (2, 13)),
        ("2.9.1+cpu", (2, 9)),
        ("2.16.0a0+git1a2b3c4", (2, 16)),
        ("2.9.0a0+79aa17489c.nv25.04", (2, 9)),
        ("2.10", (2, 10)),
        ("unknown", None),
        ("1a2b3c4", None),
        ("", None),
    ],
)
def test_versions_are_read_as_builds_write_them(text, numbers):
    assert parse(text) == numbers


def version(numbers, change=0):
    return f"{numbers[0]}.{numbers[1] + change}.0"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (version(OLDEST, -1), "is too old"),
        ("1.13.1", "is too old"),
        (version(OLDEST), None),
        (version(NEWEST) + "+cu132", None),
        (version(NEWEST) + "rc1", None),
        (version(NEWEST, 1) + ".dev20261122+cpu", "is too new to have been tested"),
        ("unknown", "cannot be compared"),
    ],
)
def test_what_is_outside_of_the_range_is_said_and_too_old_is_fatal(text, says):
    found = mismatch(text)
    assert (found is None) is (says is None)
    if found is not None:
        assert found.message.startswith(f"torch {text} {says}: ")
        assert found.is_fatal == (says == "is too old")


def made_up(folder: Path, text: str) -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text("raise SystemExit('imported')\n")
    (folder / "torch/version.py").write_text(text)
    return folder


def seen(folder: Path, code: str) -> str:
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '9.9.9+cpu'\ndebug = False\n", "9.9.9+cpu"),
        ('__version__: str = "9.9.9"\n', "9.9.9"),
        ("", importlib.metadata.version("torch")),
    ],
)
def test_installed_version_is_that_of_the_torch_that_would_be_imported(tmp_path, text, expected):
    code = "from fsdplaunch.probe.torch_version import installed; print(installed())"
    assert seen(made_up(tmp_path, text), code) == f"{expected}\n"


def test_no_torch_is_none(monkeypatch):
    monkeypatch.setattr(torch_version.importlib.util, "find_spec", lambda _: None)
    assert installed() is None


def test_worker_api_refuses_a_torch_that_is_too_old_before_it_imports_it(tmp_path):
    code = (
        "import fsdplaunch\ntry: fsdplaunch.prepare\nexcept Exception as e: print(type(e).__name__, e.exit_code)"
    )
    assert seen(made_up(tmp_path, "__version__ = '2.5.1'"), code) == f"{MachineError.__name__} {EXIT_MACHINE}\n"
