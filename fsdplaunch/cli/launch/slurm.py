"""`fsdplaunch launch --slurm`: write a batch script into the run's folder and submit it."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from fsdplaunch.cli.launch.handoff import Handoff
from fsdplaunch.cli.launch.options import PROGRAM, LaunchRequest
from fsdplaunch.cli.output import Output
from fsdplaunch.config.schema.config import Config
from fsdplaunch.run_dir import CONFIG

SCRIPT = "job.sbatch"
SECRETS = "secrets.sh"
"""The variables that only this user is to read (0600); the batch script reads them."""


def launch_on_slurm(request: LaunchRequest, out: Output) -> int:
    """Write a batch script into the run's folder and submit it."""
    from fsdplaunch.launch.schedulers.slurm.batch_script import batch_script
    from fsdplaunch.launch.schedulers.slurm.commands import submit

    config, handoff = request.config, Handoff(request, out)
    run_id, run_dir = handoff.run_id, handoff.run_dir
    python = "python3" if config.slurm.container_image else sys.executable
    words = request.words([python, *PROGRAM], str(run_dir / CONFIG))
    secrets = run_dir / SECRETS
    text = batch_script(config, words, run_id=run_id, run_dir=run_dir, folder=Path.cwd(), secrets=secrets)
    plan = handoff.plan(("sbatch", "--parsable", str(run_dir / SCRIPT)), sent=text)
    if handoff.is_only_shown(plan):
        return 0
    for note in _slurm_notes(config):
        out.note(note)
    handoff.write_folder(plan, {SCRIPT: text, SECRETS: _exports(handoff.secrets())}, private=(SECRETS,))
    job = submit(str(run_dir / SCRIPT))
    sentence = f"run {run_id} is SLURM job {job}; fsdplaunch runs logs {run_id} --follow, runs cancel {run_id}"
    return handoff.submitted(sentence, route="slurm", shown={"job": job})


def _exports(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _slurm_notes(config: Config) -> list[str]:
    gpus = config.slurm.gpus_per_node or any("gpu" in line or "gres" in line for line in config.slurm.lines)
    if gpus or config.use_cpu:
        return []
    return ["slurm.gpus_per_node is not set: the job gets no GPUs unless the partition gives them to every job"]
