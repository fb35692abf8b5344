"""SLURM's own commands, read in the formats that do not change from version to version: never --json."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from fsdplaunch.errors import LaunchError, MachineError

UNFINISHED = frozenset(
    {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "STAGE_OUT"}
    | {"SIGNALING", "STOPPED", "RESIZING", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
"""States of a job that may still do something."""
_PATIENCE = 60


def submit(script: str) -> str:
    """Submit a batch script; returns the job's number.

    Args:
        script: Its path.

    Raises:
        LaunchError: There is no sbatch here, or it refuses.
    """
    return _ask(["sbatch", "--parsable", script]).strip().partition(";")[0]


def job_states(jobs: Sequence[str]) -> dict[str, str]:
    """State of each job that SLURM still knows, with the reason of those that wait.

    A job in an array appears under the array's number, with the state of its first unfinished part.
    """
    if not jobs or not shutil.which("squeue"):
        return {}
    states: dict[str, str] = {}
    for job in jobs:  # one by one: squeue refuses a list with one number that is too old
        done = _run(["squeue", "-h", "-t", "all", "-j", job, "-o", "%T %r"])
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()] if not done.returncode else []
        if lines:
            first = next((line for line in lines if line.split()[0] in UNFINISHED), lines[0])
            state, _, reason = first.partition(" ")
            states[job] = f"{state} ({reason})" if state == "PENDING" and reason not in ("", "None") else state
        elif accounted := _accounted(job):
            states[job] = accounted
    return states


def _accounted(job: str) -> str | None:
    """The state in SLURM's accounting, which many sites do not have."""
    if not shutil.which("sacct"):
        return None
    done = _run(["sacct", "-n", "-X", "-P", "-j", job, "-o", "State"])
    words = done.stdout.split()
    return words[0] if not done.returncode and words else None


def cancel(job: str) -> None:
    """End a job: its workers are asked first, as SLURM does it.

    Raises:
        LaunchError: SLURM refuses.
    """
    _ask(["scancel", job])


def srun_words(environ: Mapping[str, str], machines: int) -> list[str]:
    """What starts one launcher on each machine of the allocation this process runs in."""
    cpus = environ.get("SLURM_CPUS_PER_TASK")
    return [
        "srun",
        f"--nodes={machines}",
        f"--ntasks={machines}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        *([f"--cpus-per-task={cpus}"] if cpus else []),
    ]


def _ask(words: Sequence[str]) -> str:
    if shutil.which(words[0]) is None:
        msg = f"there is no {words[0]} here"
        raise MachineError(msg, hint="run this on a machine of the SLURM cluster, or load its module")
    done = _run(words)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        msg = f"{words[0]} refused: {said}"
        raise LaunchError(msg, hint="see slurm: in the configuration, and sinfo")
    return done.stdout


def _run(words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=_PATIENCE, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        msg = f"{words[0]} has not answered within {_PATIENCE} s"
        raise LaunchError(msg, hint="is SLURM's controller up? scontrol ping") from None


def in_job() -> bool:
    """Whether this process belongs to a SLURM job."""
    return "SLURM_JOB_ID" in os.environ
