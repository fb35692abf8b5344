"""The names inside a run's folder, shared by launcher, agent and workers, and how files there are written."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdplaunch.atomic_file import atomic_file

PLAN = "plan.json"
CONFIG = "config.yaml"
RESULT = "result.json"
AGENT_LOG = "agent.log"
MACHINES = "machines.json"
LOST = "lost"
"""A file of this name says that the run ended because a machine was lost; batch scripts look for it."""
SHARDED = "sharded"
"""A file of this name in a rank's folder says that the rank sharded a model."""
REHEARSAL = "rehearsal.json"
"""File in a rank's folder that says how `fsdplaunch check` went there."""
_RECORD = "agent.json"
_TAIL_BYTES = 8192


def agent_record(run_dir: Path) -> Path:
    """What this machine's agent found out about its workers."""
    return run_dir / _RECORD


def rank_folder(run_dir: Path, rank: int) -> Path:
    """The folder of one rank's files."""
    return run_dir / "ranks" / str(rank)


def rank_log(run_dir: Path, rank: int, stream: str, attempt: int) -> Path:
    """The file of one rank's output (`stdout` or `stderr`) in one attempt, from 0."""
    name = f"{stream}.attempt{attempt}.log" if attempt else f"{stream}.log"
    return rank_folder(run_dir, rank) / name


def error_file(run_dir: Path, rank: int, attempt: int) -> Path:
    """Where a worker records the exception that ended it."""
    name = f"error.attempt{attempt}.json" if attempt else "error.json"
    return rank_folder(run_dir, rank) / name


def write_json(path: Path, value: Any) -> None:
    """Write a file that is there as a whole or not at all."""
    with atomic_file(path) as part:
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def point_latest(run_dir: Path) -> None:
    """Have the link `latest` beside a run's folder lead to it; a user's own file of that name is left alone.

    Some file systems have no symbolic links; there the run does without.
    """
    latest = run_dir.parent / "latest"
    if latest.is_symlink() or not latest.exists():
        with suppress(OSError), atomic_file(latest) as link:
            link.symlink_to(run_dir.name)


def read_json(path: Path) -> dict[str, Any]:
    """Read an object; empty when there is no such file or it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_tail(path: Path, lines: int = 20) -> list[str]:
    """The last lines of a log, without reading all of it."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-lines:]
    return []
