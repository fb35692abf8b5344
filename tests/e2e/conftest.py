"""The installed command, run as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
def environ() -> dict[str, str]:
    """The variables a launch starts with."""
    return clean_environ()


@pytest.fixture
def examples() -> Path:
    """The folder with the example scripts."""
    return ROOT / "scripts" / "examples"


TIMEOUT = 120


class Launched:
    """A launch that has been started."""

    def __init__(self, folder: Path, process: "subprocess.Popen[str]") -> None:
        self.folder, self.process = folder, process
        self.stdout = self.stderr = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        self.stdout, self.stderr = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode

    def wait_for(self, name: str, seconds: float = 60) -> str:
        """Wait until a script has written a file; return its text."""
        return wait_for(self.folder / name, seconds)

    @property
    def dir(self) -> Path:
        return (self.folder / "runs" / "latest").resolve()

    def json(self, name: str = "result.json") -> dict[str, Any]:
        return json.loads((self.dir / name).read_text())

    def log(self, rank: int, name: str = "stdout.log") -> str:
        return (self.dir / "ranks" / str(rank) / name).read_text()


def wait_for(path: Path, seconds: float = 60) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.02)
    pytest.fail(f"{path.name} was not written within {seconds} s")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Return a function that starts `fsdplaunch launch ARGS SCRIPT`; SCRIPT's text is given, its name is t.py."""
    runs: list[Launched] = []

    def begin(
        text: str | None,
        *options: str,
        arguments: tuple[str, ...] = (),
        plain: bool = True,
        binary: bool = False,
        **popen: Any,
    ) -> Launched:
        if text is not None:
            (tmp_path / "t.py").write_text(text)
        environ = clean_environ() | popen.pop("env", {})
        defaults = ("--distributed-type", "MULTI_CPU", "--num-processes", "2") if plain else ()
        # -P: like the installed command, and unlike `python -m`, leave the current folder out of the module path.
        command = [sys.executable, "-P", "-m", "fsdplaunch", "launch", *defaults, *options]
        command += ["t.py", *arguments] if text is not None else arguments
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | popen
        process = subprocess.Popen(command, cwd=tmp_path, env=environ, text=not binary, **streams)
        runs.append(Launched(tmp_path, process))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
            run.process.wait()


@pytest.fixture
def launch(start: Callable[..., Launched]) -> Callable[..., Launched]:
    """Return a function that does the same and waits for the end; the run has `code`, `stdout` and `stderr`."""

    def run(*args: Any, **kwargs: Any) -> Launched:
        done = start(*args, **kwargs)
        done.code = done.end()
        return done

    return run


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pids: list[int], seconds: float) -> list[int]:
    """The processes that are still there after so long."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]
