"""SLURM: its commands, in the formats that do not change between versions (never --json), and a run's script.

The script puts itself back into the queue. SLURM does so only for jobs that are still there when the grace of a
preemption ends, and not for those that have saved and left in time.
"""

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fsdplaunch.config.resolve import node_range
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import EXIT_SAVED, LaunchError, UsageError
from fsdplaunch.launch.schedulers import LateError, ask
from fsdplaunch.run_dir import GROUP_RUN, LOST

UNFINISHED = frozenset(
    {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "STAGE_OUT"}
    | {"SIGNALING", "STOPPED", "RESIZING", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
"""States of a job that may still do something."""
_STRAGGLER_SECONDS = 30.0
"""Between the ends of the first and the last launcher, beside the grace: more than they wait for each other."""
_LOST_TIMES = 20
"""How often a job goes back into the queue because a node was lost: a network may be broken for good."""
_PART = '"${SLURM_ARRAY_TASK_ID:+task$SLURM_ARRAY_TASK_ID/}try${SLURM_RESTART_COUNT:-0}"'
"""Folder of this part of the run, inside the run's own: one per task of an array and per start."""
_PLAIN = re.compile(r"[^\x00-\x1f\x7f]*")
_BODY = """\
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then  # the number of the last task is also the whole array's
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
warned=0
warn() {
    warned=1
    echo "fsdplaunch: SLURM announces the end of job $job: asking the workers to save" >&2
    scancel --signal=TERM "$job"
}
trap warn USR1

srun @SRUN@ \\
    @COMMAND@ &
step=$!
while :; do  # a trapped signal ends wait early
    wait "$step"
    code=$?
    kill -0 "$step" 2>/dev/null || break
done
"""
_REQUEUE = """
preempted() { scontrol show job -o "$job" | grep -q ' PreemptTime=[0-9]'; }
lost() {  # the launchers notice a lost node long before SLURM does; but not for ever
    [ "${SLURM_RESTART_COUNT:-0}" -lt @TIMES@ ] || return
    find @RUNS@/"$@GROUP@" -maxdepth 2 -name @LOST@ | grep -q .
}
if [ "$code" = @SAVED@ ] || { [ "$code" != 0 ] && { [ "$warned" = 1 ] || preempted || lost; }; }; then
    echo "fsdplaunch: the workers have stopped ($code): back into the queue" >&2
    if scontrol requeue "$job"; then
        sleep 60  # until SLURM ends this script
    fi
fi
"""


def submit(script: str) -> str:
    """Submit a batch script; returns the job's number."""
    return _ask(["sbatch", "--parsable", script]).strip().partition(";")[0]


def job_states(job: str) -> dict[str, str]:
    """Return the state of each task of a job's array, by number; of a job without an array under "".

    They have the reason of those that wait with them; empty where SLURM does not know the job any more.
    """
    states = {}
    for line in _said(["squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%i|%T|%r"]):
        name, state, reason = line.strip().split("|", 2)  # a number or NUMBER_TASK
        waits = state == "PENDING" and reason not in ("", "None")
        states[name.partition("_")[2]] = f"{state} ({reason})" if waits else state
    if states or not shutil.which("squeue"):
        return states
    # SLURM's accounting, which many sites do not have.
    said = _said(["sacct", "-n", "-X", "-P", "-j", job, "-o", "JobID,State"])
    lines = (line.partition("|")[::2] for line in said if "|" in line)
    return {name.partition("_")[2]: state.split()[0] for name, state in lines if state.strip()}


def _said(words: Sequence[str]) -> list[str]:
    """Return the lines that a command prints; none where it is not there, or refuses."""
    try:
        return _ask(words).splitlines()
    except LateError:
        raise
    except LaunchError:
        return []


def cancel(job: str) -> None:
    """End a job: its workers are asked first, as SLURM does it."""
    _ask(["scancel", job])


def _one_launcher_each(config: Config) -> list[str]:
    """Return srun's options for the launchers: one on each node, which end together.

    One that has failed does not end the others, which may still save. But once the first has gone, the last one
    follows within the grace; if not, it hangs, and srun would wait for it until the job's time is over.
    """
    wait = round(config.launch.shutdown_grace_seconds + _STRAGGLER_SECONDS)
    return ["--ntasks-per-node=1", "--kill-on-bad-exit=0", f"--wait={wait}"]


def srun_words(config: Config, environ: Mapping[str, str], nodes: int) -> list[str]:
    """Return what starts one launcher on each node of the allocation this process runs in."""
    cpus = environ.get("SLURM_CPUS_PER_TASK")
    count = [f"--nodes={nodes}", f"--ntasks={nodes}", *([f"--cpus-per-task={cpus}"] if cpus else [])]
    return ["srun", *count, *_one_launcher_each(config)]


def _ask(words: Sequence[str]) -> str:
    return ask(
        words,
        seconds=60,
        missing="run this on a node of the SLURM cluster, or load its module",
        late="is SLURM's controller up? scontrol ping",
        refused="see slurm: in the configuration, and sinfo",
    )


def batch_script(
    config: Config,
    command: Sequence[str],
    *,
    run_id: str,
    run_dir: Path,
    folder: Path,
    secrets: Path | None = None,
) -> str:
    """Return the script, which runs in a folder; all paths are absolute.

    `srun` gets the command, which starts the launcher on each node, word by word. Variables that are not for this
    script's readers are in a file of their own.
    """
    slurm = config.slurm
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in _options(config, run_id=run_id, run_dir=run_dir))]
    lines += ["", f"# run {shlex.quote(run_id)}, written by fsdplaunch launch --slurm"]
    # The name that all launchers use, and what SLURM forgets to hand on.
    lines += [f"export {GROUP_RUN}={shlex.quote(run_id)}/{_PART}"]
    lines += ['[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK']
    lines += [f"cd -- {shlex.quote(str(folder))} || exit 1"]
    lines += [f". {shlex.quote(str(secrets))} || exit 1"] if secrets else []
    lines += [f"module load {shlex.quote(module)} || exit 1" for module in slurm.modules]
    lines += [*slurm.setup, ""]
    srun = _one_launcher_each(config)
    srun += [f"--container-image={slurm.container_image}"] if slurm.container_image else []
    srun += [f"--container-mounts={','.join(slurm.container_mounts)}"] if slurm.container_mounts else []
    facts = {
        "SRUN": shlex.join(srun),
        "GROUP": GROUP_RUN,
        "SAVED": str(EXIT_SAVED),
        "LOST": LOST,
        "TIMES": str(_LOST_TIMES),
        "RUNS": shlex.quote(str(run_dir.parent)),
        "COMMAND": " \\\n        ".join(shlex.quote(word) for word in command),  # last: it may hold such marks
    }
    body = _BODY + (_REQUEUE if slurm.requeue else "")
    for name, value in facts.items():
        body = body.replace(f"@{name}@", value)
    return "\n".join(lines) + body + 'exit "$code"\n'


def _options(config: Config, *, run_id: str, run_dir: Path) -> Iterator[str]:
    slurm = config.slurm
    least, most = node_range(config)
    named = {
        "job-name": run_id,
        "nodes": str(least) if least == most else f"{least}-{most}",
        "ntasks-per-node": "1",
        "output": f"{str(run_dir).replace('%', '%%')}/{'slurm-%A_%a.out' if slurm.array else 'slurm-%j.out'}",
        "open-mode": "append",
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time,
        "gpus-per-node": slurm.gpus_per_node,
        "cpus-per-task": str(slurm.cpus_per_task) if slurm.cpus_per_task else None,
        "mem": slurm.mem,
        "constraint": slurm.constraint,
        "array": slurm.array,
        "signal": f"B:USR1@{slurm.signal_seconds}" if slurm.signal_seconds else None,
    }
    for name, value in named.items():
        if value is None:
            continue
        if not _PLAIN.fullmatch(value):
            msg = f"--{name}={value!r} cannot be given to sbatch: it holds a line break or a control character"
            raise UsageError(msg, hint="choose another name or folder")
        if not re.fullmatch(r"[\w.,:/%@+=&|*()\[\]-]+", value):  # sbatch reads it in quotes
            value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'  # noqa: PLW2901
        yield f"--{name}={value}"
    yield "--requeue" if slurm.requeue else "--no-requeue"
    for line in slurm.lines:
        if not _PLAIN.fullmatch(line):
            msg = f"slurm.lines: {line!r} is more than one line"
            raise UsageError(msg, hint="give each #SBATCH line an entry of its own")
        yield line.removeprefix("#SBATCH").strip()
