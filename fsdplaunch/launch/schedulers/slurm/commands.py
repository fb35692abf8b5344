"""SLURM's own commands, read in the formats that do not change from version to version: never --json."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import LaunchError, MachineError

UNFINISHED = frozenset(
    {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "STAGE_OUT"}
    | {"SIGNALING", "STOPPED", "RESIZING", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
"""States of a job that may still do something."""
STRAGGLER_SECONDS = 30.0
"""Between the ends of the first and the last launcher, beside the grace: more than they wait for each other."""
_PATIENCE = 60


def submit(script: str) -> str:
    """Submit a batch script; returns the job's number.

    Args:
        script: Its path.

    Raises:
        LaunchError: There is no sbatch here, or it refuses.
    """
    return _ask(["sbatch", "--parsable", script]).strip().partition(";")[0]


def job_states(jobs: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the state of each job that SLURM still knows, with the reason of those that wait.

    Args:
        jobs: Numbers, as `submit` returns them.

    Returns:
        For each job the state of each task of its array, by number; of a job without an array under "".
    """
    if not jobs or not shutil.which("squeue"):
        return {}
    found = {}
    for job in jobs:  # one by one: squeue refuses a list with one number that is too old
        done = _run(["squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%i|%T|%r"])
        states = _listed(done.stdout) if not done.returncode else {}
        if states := states or _accounted(job):
            found[job] = states
    return found


def _listed(text: str) -> dict[str, str]:
    """Return the states out of lines JOB|STATE|REASON, where JOB is a number or NUMBER_TASK."""
    states = {}
    for line in text.splitlines():
        name, state, reason = line.strip().split("|", 2)
        waits = state == "PENDING" and reason not in ("", "None")
        states[name.partition("_")[2]] = f"{state} ({reason})" if waits else state
    return states


def _accounted(job: str) -> dict[str, str]:
    """Return the states in SLURM's accounting, which many sites do not have."""
    if not shutil.which("sacct"):
        return {}
    done = _run(["sacct", "-n", "-X", "-P", "-j", job, "-o", "JobID,State"])
    if done.returncode:
        return {}
    lines = (line.partition("|")[::2] for line in done.stdout.splitlines() if "|" in line)
    return {name.partition("_")[2]: state.split()[0] for name, state in lines if state.strip()}


def cancel(job: str) -> None:
    """End a job: its workers are asked first, as SLURM does it.

    Raises:
        LaunchError: SLURM refuses.
    """
    _ask(["scancel", job])


def one_launcher_each(config: Config) -> list[str]:
    """Return srun's options for the launchers: one on each node, which end together.

    One that has failed does not end the others, which may still save. But once the first has gone, the last one
    follows within the grace; if not, it hangs, and srun would wait for it until the job's time is over.
    """
    wait = round(config.launch.shutdown_grace_seconds + STRAGGLER_SECONDS)
    return ["--ntasks-per-node=1", "--kill-on-bad-exit=0", f"--wait={wait}"]


def srun_words(config: Config, environ: Mapping[str, str], nodes: int) -> list[str]:
    """Return what starts one launcher on each node of the allocation this process runs in."""
    cpus = environ.get("SLURM_CPUS_PER_TASK")
    count = [f"--nodes={nodes}", f"--ntasks={nodes}", *([f"--cpus-per-task={cpus}"] if cpus else [])]
    return ["srun", *count, *one_launcher_each(config)]


def _ask(words: Sequence[str]) -> str:
    if shutil.which(words[0]) is None:
        msg = f"there is no {words[0]} here"
        raise MachineError(msg, hint="run this on a node of the SLURM cluster, or load its module")
    done = _run(words)
    if done.returncode:
        answer = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        msg = f"{words[0]} refused: {answer}"
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
    """Return whether this process belongs to a SLURM job."""
    return "SLURM_JOB_ID" in os.environ
