"""A run's name and its folder: what stands in it, shared by launcher, agent and workers, and how it is written.

A worker keeps a few numbers in a mapped file of its rank's folder, without a thread and without a system call. On
a signal it also writes every thread's Python stack, from C code, so that it answers even while a collective never
ends.
"""

import errno
import json
import os
import signal
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from fsdplaunch.files import atomic_file, parse_json

RUN_DIR = "FSDPLAUNCH_RUN_DIR"
"""Contract variable, not a key: the run's folder, for its agents and workers."""
PLAN = "plan.json"
CONFIG = "config.yaml"
RESULT = "result.json"
AGENT_LOG = "agent.log"
MEMBERSHIP = "membership.json"
JOB = "job.json"
"""How the run was started, and what its scheduler knows it by."""
REVISION = "revision"
"""The git revision of the script's folder when the run began."""
CHECKPOINTS = "checkpoints"
"""File in rank 0's folder with a line for each checkpoint that the run has written: its folder."""
START = "start.txt"
"""When each process was done with a part of the run's start, where launch.timing asks for it."""
LOST = "lost"
"""A file of this name says that the run ended because a node was lost; batch scripts look for it."""
LATEST = "latest"
"""A link beside the runs to the newest of them."""
SHARDED = "sharded"
"""An empty file in a rank's folder that says that the rank sharded a model."""
REHEARSAL = "rehearsal.json"
"""File in a rank's folder that says how `fsdplaunch check` went there."""
COMPARED_PLAIN = "plain.json"
"""File in a comparison's folder with what one process computed."""
COMPARED_CHANGED = "changed.json"
"""File in a comparison's folder with the same, of weights that were changed in their last digits."""
FLIGHT_RECORDER = "flight-recorder-rank-"
"""Where torch writes the last collectives; it adds the rank."""
FOLDER_MODE, PRIVATE_MODE = 0o700, 0o600
"""Of a run's folder and its files, which only this user is to read."""
_TAIL_BYTES = 32768
_MAX_JSON = 256 * 2**20
GROUP_RUN = "FSDPLAUNCH_GROUP_RUN"
"""Contract variable, not a key: the run's name, where the one who started all nodes' launchers chose it.

With a / at its end it is the name of a folder only, in which every start gets a name and a folder of its own: for
schedulers that start a run again without saying so.
"""
STACK = "stack.txt"
STACK_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None
"""A signal nobody else uses; its default would end a process, so only workers whose record is begun get it."""
MARKED = "FSDPLAUNCH_MARKED"
"""Contract variable, not a key: `1` for a worker whose error output passes through the agent to a launcher."""
BEGIN_HIDDEN, END_HIDDEN = b"\0\1fsdplaunch\0", b"\0\2fsdplaunch\0"
"""Around what such a worker writes for its file only, because the launcher will say it."""


def agent_record(run_dir: Path) -> Path:
    """Return the file of what this node's agent found out about its workers."""
    return run_dir / "agent.json"


def node_folder(run_dir: Path, node: int) -> Path:
    """Return the folder of one node's files: the run's own for node 0, else one inside it.

    On a file system that all nodes share nothing collides; elsewhere each node has its own.
    """
    return run_dir / f"node{node}" if node else run_dir


def rank_folder(run_dir: Path, rank: int | str) -> Path:
    """Return the folder of one rank's files; with `*`, the pattern for all of them."""
    return run_dir / "ranks" / str(rank)


def rank_log(run_dir: Path, rank: int, stream: str, attempt: int) -> Path:
    """Return the file of one rank's output (`stdout` or `stderr`) in one attempt, from 0; people count from 1."""
    name = f"{stream}.attempt{attempt + 1}.log" if attempt else f"{stream}.log"
    return rank_folder(run_dir, rank) / name


def error_file(run_dir: Path, rank: int, attempt: int) -> Path:
    """Return the file where a worker records the exception that ended it."""
    name = f"error.attempt{attempt + 1}.json" if attempt else "error.json"
    return rank_folder(run_dir, rank) / name


def note_start(part: str) -> None:
    """Note that a part of the run's start is done, here, where the launcher has made a file for it."""
    with suppress(OSError, KeyError):
        file = os.open(f"{os.environ[RUN_DIR]}/{START}", os.O_WRONLY | os.O_APPEND)
        os.write(file, f"{os.getpid()} {part} {time.time_ns()}\n".encode())
        os.close(file)


def link_latest(run_dir: Path) -> None:
    """Have `latest` lead to this run; a user's own file of that name is left alone.

    Some file systems have no symbolic links; there the run does without.
    """
    latest = run_dir.with_name(LATEST)
    if latest.is_symlink() or not latest.exists():
        with suppress(OSError), atomic_file(latest) as link:
            link.symlink_to(run_dir.name)


def write_json(path: Path, value: Any) -> None:
    """Write a value's JSON as `write_text` writes."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file for this user alone that is there completely or not at all."""
    with atomic_file(path) as part:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)


def read_json(path: Path) -> dict[str, Any]:
    """Read an object; empty when there is no such file or it holds something else."""
    with suppress(OSError, ValueError), open_file(path) as file:
        value = parse_json(file.read(_MAX_JSON))
        return value if isinstance(value, dict) else {}
    return {}


def open_file(path: Path) -> BinaryIO:
    """Open a run's file for reading; only a regular file: a named pipe would be waited for."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))


def read_tail(path: Path, lines: int = 20) -> list[str]:
    """Return the last lines of a log, without reading all of it."""
    with suppress(OSError), open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-lines:]
    return []


def fresh_run_id() -> str:
    """Return a name for a run: when it was started, and a few characters of its own."""
    return f"{time.strftime('%Y-%m-%d_%H%M%S')}-{os.urandom(2).hex()}"


def run_name(environ: Mapping[str, str]) -> tuple[str, Path]:
    """Return the run's name and its folder inside launch.log_dir: given by the one who started us, else fresh."""
    given = environ.get(GROUP_RUN, "")
    if has_fixed_name(environ):
        return given.replace("/", "-"), Path(given)
    name = fresh_run_id()
    return name, Path(given) / name


def has_fixed_name(environ: Mapping[str, str]) -> bool:
    """Return whether all nodes of the run know its name from the one who started their launchers."""
    given = environ.get(GROUP_RUN, "")
    return bool(given) and not given.endswith("/")
