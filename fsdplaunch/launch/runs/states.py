"""How a run is doing, in words: out of its folder, its processes, and what a scheduler says."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdplaunch.launch.runs.records import read_end
from fsdplaunch.launch.schedulers.slurm import commands as slurm

_FINISHED_BADLY = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
State = tuple[str, bool]
"""One or a few words, and whether the run may still do something."""


def parts_of(run_dir: Path) -> list[Path]:
    """Return the folders of a run's starts, oldest first: its own, or one for each time SLURM started it."""
    tries = [path for path in run_dir.glob("try*") if path.is_dir()]
    return sorted(tries, key=lambda path: path.stat().st_ctime) or [run_dir]


def result_of(run_dir: Path) -> dict[str, Any] | None:
    """Return how the last start of a run ended; None when it has not."""
    return read_end(parts_of(run_dir)[-1])


def ended_state(result: Mapping[str, Any]) -> str:
    """Return how a run ended, in words.

    Args:
        result: As its launcher wrote it.
    """
    if result.get("stopped_by"):
        return f"stopped by {result['stopped_by']}"
    return "done" if result["exit_code"] == 0 else f"failed ({result['exit_code']})"


def slurm_state(reported: str | None, ended: Mapping[str, Any] | None) -> State:
    """Return the state of a SLURM job or of one task of its array.

    Args:
        reported: SLURM's word for it; None when it does not know the job any more.
        ended: Result of its last start, if that has ended.
    """
    if reported is None:
        return (ended_state(ended) if ended else "unknown to SLURM"), False
    word, _, reason = reported.partition(" ")
    if word in slurm.UNFINISHED:
        return f"{word.lower()} {reason}".rstrip(), True
    if ended is None or (word.startswith(_FINISHED_BADLY) and not (word == "FAILED" and ended["exit_code"])):
        return word.lower(), False
    return ended_state(ended), False


def process_state(job: Mapping[str, Any]) -> State:
    """Return the state of a run that a process of some node looks after."""
    host = job.get("host")
    if not job:
        return "unknown", False
    if host != socket.gethostname():
        return f"started on {host}", True
    if is_alive(job):
        return "running", True
    return "lost: its launcher has gone", False


def is_alive(job: Mapping[str, Any]) -> bool:
    """Return whether the process that started a run is still there, and not another one of its number."""
    since = start_of(int(job["pid"]))
    return since is not None and since == job.get("since")


def start_of(pid: int) -> int | None:
    """Return when a process started, in the kernel's ticks; None when there is none, or a zombie."""
    with suppress(OSError, IndexError, ValueError):
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return None if words[0] == "Z" else int(words[19])
    return None
