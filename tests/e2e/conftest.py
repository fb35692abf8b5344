"""The installed command, run as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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


@pytest.fixture(scope="session")
def warm_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The runtime folder of warm interpreters, which end with the tests."""
    folder = tmp_path_factory.mktemp("warm")
    folder.chmod(0o700)
    (folder / "t.py").write_text("")
    yield folder
    command = [sys.executable, "-m", "fsdplaunch", "warm", "--stop"]
    subprocess.run(
        command, env=clean_environ() | {"XDG_RUNTIME_DIR": str(folder)}, check=True, capture_output=True
    )


def leave_warm(folder: Path, *options: str) -> dict[str, str]:
    """Launch a script that leaves its interpreter; return the variables of launches that find it."""
    environ = clean_environ() | {"XDG_RUNTIME_DIR": str(folder)}
    command = [sys.executable, "-P", "-m", "fsdplaunch", "launch", "--keep-warm", "1800", *options, "t.py"]
    subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True)
    return environ


@pytest.fixture(scope="session")
def warm_environ(warm_folder: Path) -> dict[str, str]:
    """The variables of launches that find torch imported: tests that are not about a start need not wait."""
    return leave_warm(warm_folder, "--use-cpu", "--allow-unsharded")


@pytest.fixture(scope="session")
def warm_plain_environ(warm_folder: Path) -> dict[str, str]:
    """The same for launches that shard nothing, whose workers import less."""
    return leave_warm(warm_folder, "--distributed-type", "MULTI_CPU")


@pytest.fixture
def fsdplaunch(tmp_path: Path, warm_environ: dict[str, str]) -> Run:
    """Return a function that runs `fsdplaunch ARGS` in tmp_path."""

    def run(*arguments: str | Path, timeout: float = 180, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "fsdplaunch", *map(str, arguments)],
            cwd=tmp_path,
            env=warm_environ | env,
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


TIMEOUT = 120
WARM = bool(os.environ.get("LAUNCH_TESTS_WARM"))
"""Whether launches leave a warm interpreter, and later ones are forked from it: scripts/campaigns/warm sets it."""
AT_A_TIME = 3


class Launched:
    """A launch that has been started."""

    def __init__(self, folder: Path, process: "subprocess.Popen[str]") -> None:
        self.folder, self.process = folder, process
        self.stdout = self.stderr = ""
        self.code: int | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        self.stdout, self.stderr = self.process.communicate(timeout=TIMEOUT)
        self.code = self.process.returncode
        return self.code

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


def begin(
    folder: Path,
    text: str | None,
    *options: str,
    arguments: tuple[str, ...] = (),
    plain: bool = True,
    binary: bool = False,
    **popen: Any,
) -> Launched:
    """Start `fsdplaunch launch OPTIONS t.py ARGUMENTS` in a folder; t.py gets the text, unless that is None."""
    if text is not None:
        (folder / "t.py").write_text(text)
    environ = popen.pop("environ", clean_environ()) | popen.pop("env", {})
    defaults = ("--distributed-type", "MULTI_CPU", "--num-processes", "2") if plain else ()
    defaults += ("--keep-warm", "600") if WARM else ()
    # -P: like the installed command, and unlike `python -m`, leave the current folder out of the module path.
    command = [sys.executable, "-P", "-m", "fsdplaunch", "launch", *defaults, *options]
    command += ["t.py", *arguments] if text is not None else arguments
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | popen
    process = subprocess.Popen(command, cwd=folder, env=environ, text=not binary, **streams)
    return Launched(folder, process)


def run_to_the_end(start: Callable[..., "Launched"], _folder: Path, *args: Any, **kwargs: Any) -> "Launched":
    """Start a launch and wait for its end: the job for cases that need no more."""
    run = start(*args, **kwargs)
    run.end()
    return run


@contextmanager
def starting(folder: Path, environ: Mapping[str, str] | None = None) -> Iterator[Callable[..., Launched]]:
    """Give a function that does that in this folder; what it started does not outlive the block."""
    runs: list[Launched] = []

    def start(*args: Any, **kwargs: Any) -> Launched:
        runs.append(begin(folder, *args, **({"environ": environ} if environ else {}), **kwargs))
        return runs[-1]

    try:
        yield start
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.process.send_signal(signal.SIGKILL)
                run.process.wait()


@pytest.fixture(scope="module")
def launch_environ(request: pytest.FixtureRequest) -> dict[str, str]:
    """The variables of a module's launches: they find torch imported, unless the module is COLD."""
    if getattr(request.module, "COLD", False):
        return clean_environ()
    environ: dict[str, str] = request.getfixturevalue("warm_plain_environ")
    return environ


@pytest.fixture
def start(tmp_path: Path, launch_environ: dict[str, str]) -> Iterator[Callable[..., Launched]]:
    """Return a function that starts `fsdplaunch launch ARGS SCRIPT`; SCRIPT's text is given, its name is t.py."""
    with starting(tmp_path, launch_environ) as function:
        yield function


@pytest.fixture(scope="module")
def side_by_side(
    tmp_path_factory: pytest.TempPathFactory, launch_environ: dict[str, str]
) -> Callable[..., dict[str, Future[Any]]]:
    """Return a function that runs a job for each of several cases, a few at a time, each in a folder of its own.

    A launch is busy on one processor for most of its time, and the rest of it waits. Each test asks for its own
    case's result, and so fails by itself.
    """

    def run(job: Callable[..., Any], cases: Mapping[str, tuple[Any, ...]]) -> dict[str, Future[Any]]:
        def one(folder: Path, *case: Any) -> Any:
            with starting(folder, launch_environ) as function:
                return job(function, folder, *case)

        folders = {name: tmp_path_factory.mktemp("case") for name in cases}  # not in threads: a race
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            return {name: pool.submit(one, folders[name], *case) for name, case in cases.items()}

    return run


@pytest.fixture
def launch(start: Callable[..., Launched]) -> Callable[..., Launched]:
    """Return a function that does the same and waits for the end; the run has `code`, `stdout` and `stderr`."""

    def run(*args: Any, **kwargs: Any) -> Launched:
        done = start(*args, **kwargs)
        done.end()
        return done

    return run


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
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
