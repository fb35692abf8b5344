"""`fsdplaunch launch --slurm`: write a batch script into the run's folder and submit it."""

import sys
from pathlib import Path

from fsdplaunch.cli.launch.handoff import PROGRAM, make_run_folder, plan_elsewhere, show_sent
from fsdplaunch.cli.launch.options import LaunchOptions
from fsdplaunch.cli.output import Output
from fsdplaunch.config.load.load import LoadedConfig
from fsdplaunch.config.schema.config import Config
from fsdplaunch.launch.plan import LaunchTarget
from fsdplaunch.launch.run_id import fresh_run_id
from fsdplaunch.launch.runs.registry import write_job
from fsdplaunch.launch.schedulers.launch_command import LaunchCommand
from fsdplaunch.run_dir import CONFIG

SCRIPT = "job.sbatch"


def launch_on_slurm(loaded: LoadedConfig, target: LaunchTarget, launch_options: LaunchOptions, out: Output) -> int:
    """Write a batch script into the run's folder and submit it."""
    from fsdplaunch.launch.schedulers.slurm.batch_script import batch_script
    from fsdplaunch.launch.schedulers.slurm.commands import submit

    run_id, run_dir = fresh_run_id(), Path(loaded.config.launch.log_dir).absolute()
    run_dir = run_dir / run_id
    python = "python3" if loaded.config.slurm.container_image else sys.executable
    order = LaunchCommand(
        target=target, config=str(run_dir / CONFIG), allow_unsharded=launch_options.allow_unsharded
    )
    text = batch_script(
        loaded.config, order.words([python, *PROGRAM]), run_id=run_id, run_dir=run_dir, folder=Path.cwd()
    )
    argv = ("sbatch", "--parsable", str(run_dir / SCRIPT))
    plan = plan_elsewhere(loaded, target, run_id=run_id, run_dir=run_dir, argv=argv, sent=text)
    if launch_options.dry_run or launch_options.check_only:
        show_sent(plan, loaded, text, as_json=launch_options.as_json, out=out)
        return 0
    for note in _slurm_notes(loaded.config):
        out.note(note)
    make_run_folder(plan, files={SCRIPT: text})
    job = submit(str(run_dir / SCRIPT))
    write_job(run_dir, route="slurm", job=job)
    if launch_options.as_json and not launch_options.follow:
        out.json({"run_id": run_id, "run_dir": str(run_dir), "route": "slurm", "job": job})
    out.say(f"run {run_id} is SLURM job {job}; fsdplaunch runs logs {run_id} --follow, runs cancel {run_id}")
    if not launch_options.follow:
        return 0
    from fsdplaunch.cli.launch.runs import follow_run

    return follow_run(run_dir, out)


def _slurm_notes(config: Config) -> list[str]:
    asked = config.slurm.gpus_per_node or any("gpu" in line or "gres" in line for line in config.slurm.lines)
    if asked or config.use_cpu:
        return []
    return ["slurm.gpus_per_node is not set: the job gets no GPUs unless the partition gives them to every job"]
