"""What a failing script prints under the bootstrap, and what is said where there is none: tests/e2e has more."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP", "ACCELERATE"))}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def alone(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """One worker of a run that shards nothing: no torch is involved."""
    command = [sys.executable, "-m", "fsdplaunch.runtime.bootstrap", *argv]
    variables = environment(FSDPLAUNCH_DISTRIBUTED_TYPE="NO", **env)
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=60)


def test_hook_of_the_script_prints_its_failure(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        """
        import sys
        sys.excepthook = lambda kind, error, trace: print("hooked", kind.__name__, trace.tb_lineno)
        raise ValueError("boom")
        """,
    )
    done = alone("script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (1, "hooked ValueError 4", "")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "no script to run"),
        (["missing.py"], "cannot read script missing.py: No such file or directory"),
        (["-m", "no_such_module"], "no module to run at no_such_module"),
    ],
)
def test_nothing_to_run_is_reported_in_one_sentence(tmp_path: Path, argv: list[str], says: str) -> None:
    done = alone(*argv, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_variable_is_named(tmp_path: Path) -> None:
    write(tmp_path / "script.py", "print('ran')")
    done = alone("script.py", cwd=tmp_path, FSDP_VERSION="3")
    assert (done.returncode, done.stdout) == (1, "")
    assert "environment variable FSDP_VERSION must be one of 1, 2, got '3'" in done.stderr
