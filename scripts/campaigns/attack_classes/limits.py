"""Odd surroundings: streams closed or full, limits, variables of other programs, folders that are gone.

Commands, and some whole runs, end with a status of ours and without a traceback, or do what they always do.
"""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fsdplaunch.parent_death import ended_with_us
from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.runs import environ
from scripts.campaigns.attack_classes.stores import descendants

COUNT = 70
WHOLE_RUNS = 8
MOST_SECONDS = 60.0
_COMMANDS = (
    *(["--help"], ["config", "show"], ["config", "validate"], ["launch", "--dry-run", "train.py"], ["runs"]),
    *(["merge-weights", "ck", "out"], ["estimate", "8b"], ["launch", "--check-only", "--cpu", "train.py"]),
)
_RUN = ["launch", "--cpu", "--num-processes", "1", "--allow-unsharded", "train.py"]
_STATUSES = (0, 1, 2, 3, -signal.SIGPIPE, -signal.SIGXFSZ, 128 + signal.SIGXFSZ)
Prepare = Callable[[], object]


def _closed(*streams: int) -> Prepare:
    return lambda: [os.close(stream) for stream in streams]


def _full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def _gone_reader() -> None:
    ours, theirs = os.pipe()
    os.dup2(theirs, 1)
    os.close(ours)


def _limit(kind: int, most: int) -> Prepare:
    return lambda: resource.setrlimit(kind, (most, most))


def _gone_folder() -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    Path(folder).rmdir()


_MEASURES: dict[str, Prepare] = {
    "no stdin": _closed(0),
    "no stdout": _closed(1),
    "no stderr": _closed(2),
    "no streams": _closed(0, 1, 2),
    "a full stdout": _full,
    "a stdout without a reader": _gone_reader,
    "the same, heard": lambda: (_gone_reader(), signal.signal(signal.SIGPIPE, signal.SIG_DFL)),
    "16 files": _limit(resource.RLIMIT_NOFILE, 16),
    "24 files": _limit(resource.RLIMIT_NOFILE, 24),
    "files of 100 bytes": _limit(resource.RLIMIT_FSIZE, 100),
    "empty files": _limit(resource.RLIMIT_FSIZE, 0),
    "a small stack": _limit(resource.RLIMIT_STACK, 2**19),
    "no folder": _gone_folder,
    "children that nobody waits for": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    "all signals blocked": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()),
    "a strict umask": lambda: os.umask(0o777),
}
_VARIABLES: dict[str, Mapping[str, str | None]] = {
    "no HOME": {"HOME": None, "USER": None, "LOGNAME": None},
    "a HOME that is not there": {"HOME": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent"},
    "a HOME that is a file": {"HOME": "/etc/passwd", "XDG_RUNTIME_DIR": "/etc/passwd"},
    "no folder for temporary files": {"TMPDIR": "/nonexistent", "XDG_RUNTIME_DIR": "/nonexistent"},
    "no PATH": {"PATH": None},
    "odd terminal": {"COLUMNS": "-1", "LINES": "x", "TERM": "\x1b[2J"},
    "no columns": {"COLUMNS": "0", "TERM": "dumb"},
    "ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
    "warnings as errors": {"PYTHONWARNINGS": "error"},
    "no docstrings": {"PYTHONOPTIMIZE": "2"},
    "odd SLURM": {"SLURM_JOB_ID": "x\ny", "SLURM_NNODES": "9" * 30, "SLURM_STEP_ID": "-1", "SLURM_NTASKS": "many"},
    "odd mpirun": {"OMPI_COMM_WORLD_SIZE": "abc", "OMPI_COMM_WORLD_RANK": "-1", "PMI_SIZE": "1e9"},
    "odd torchrun": {"RANK": "-1", "WORLD_SIZE": "two", "MASTER_PORT": "http", "LOCAL_RANK": "\u0967"},
    "odd GPUs": {"CUDA_VISIBLE_DEVICES": "a,,-1,\x1b[2J"},
    "line ends": {"FSDPLAUNCH_CONFIG": "a\nb", "FSDP_\nX": "1", "FSDP_VERSION": "2\n"},
    "no text": {"FSDPLAUNCH_LOG_DIR": "\udcff\udcfe", "X": "\udcff" * 9},
    "very long": {"FSDPLAUNCH_CONFIG": "x" * 100_000},
    "odd values": {
        "FSDP_SHARDING_STRATEGY": "\x1b]0;x\x07",
        "FSDPLAUNCH_SECRET": "short",
        "ACCELERATE_USE_FSDP": "?",
    },
    "odd clock": {"TZ": "../../etc/passwd", "SOURCE_DATE_EPOCH": "-1"},
    "another's descriptors": {"FSDPLAUNCH_LIFELINE": "1", "FSDPLAUNCH_LAUNCHER": "1"},
    "no digits": {"OMP_NUM_THREADS": "all", "NCCL_DEBUG": "\n"},
}


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: some runs, and commands, in surroundings by chance."""
    for number in range(count or COUNT):
        name, prepare, variables = _surroundings(chance)
        words = _RUN if number < WHOLE_RUNS else chance.choice(_COMMANDS)
        title = f"{number}: {' '.join(words)} with {name}"
        yield Case(name=title, attack=lambda w=words, p=prepare, v=variables: give(w, p, v))


def _surroundings(chance: random.Random) -> tuple[str, Prepare, Mapping[str, str | None]]:
    one, other = chance.choice(sorted(_MEASURES)), chance.choice(sorted(_VARIABLES))
    if chance.random() < 0.4:
        return one, _MEASURES[one], {}
    if chance.random() < 0.7:
        return other, lambda: None, _VARIABLES[other]
    return f"{one}, {other}", _MEASURES[one], _VARIABLES[other]


def give(words: list[str], prepare: Prepare, variables: Mapping[str, str | None]) -> None:
    """Run a command in such surroundings; raise when it ends in a traceback, late, or leaves processes behind."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text("print('ran')\n")
        (Path(folder) / "fsdp.yaml").write_text("use_cpu: true\nnum_processes: 1\n")
        (Path(folder) / "ck").mkdir()
        given, die = {**environ(), **variables}, ended_with_us()
        run = subprocess.Popen(
            [sys.executable, "-P", "-m", "fsdplaunch", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={name: value for name, value in given.items() if value is not None},
            start_new_session=True,
            preexec_fn=lambda: (die(), prepare()),  # noqa: PLW1509  (no threads here)
        )
        try:
            said, told = run.communicate(timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            family = descendants(run.pid)
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            said, told = run.communicate()
            raise AssertionError(f"it had not ended: {told[-1000:]!r}") from None
        text = (said + told).decode(errors="replace")
        assert run.returncode in _STATUSES, (run.returncode, text[-1500:])
        for word in ("Traceback", "this is a bug", "Exception ignored", "Fatal Python"):
            assert word not in text, text[-1500:]
