"""`fsdplaunch launch` where the run starts elsewhere: what is sent is built, shown by --dry-run, or sent."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdplaunch.cli.launch.single_node import LaunchOptions
from fsdplaunch.cli.output import Output
from fsdplaunch.config.load.load import LoadedConfig
from fsdplaunch.config.schema.config import Config, SshSection
from fsdplaunch.config.world_size import node_range
from fsdplaunch.config.write.render import render
from fsdplaunch.errors import UsageError
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget, NodeFacts, build_plan
from fsdplaunch.launch.run_id import fresh_run_id
from fsdplaunch.launch.runs.registry import write_job
from fsdplaunch.launch.schedulers.launch_command import LaunchCommand
from fsdplaunch.probe.scheduler import count_gpus
from fsdplaunch.run_dir import CONFIG, PLAN, write_json

PROGRAM = ("-P", "-m", "fsdplaunch")
"""What follows the interpreter."""
SCRIPT = "job.sbatch"


def launch_elsewhere(
    loaded: LoadedConfig, target: LaunchTarget, launch_options: LaunchOptions, out: Output
) -> int:
    """Hand a run to SLURM, to Kubernetes, or to machines over ssh.

    Raises:
        LaunchError: Before anything was started.
    """
    ssh = loaded.config.ssh
    if launch_options.route is not None and (ssh.hosts or ssh.hostfile):
        named = "ssh.hosts" if ssh.hosts else "ssh.hostfile"
        msg = f"--{launch_options.route} hands the run over, and {named} names machines to start it on"
        raise UsageError(msg, hint=f"leave out --{launch_options.route}, or {named}")
    if launch_options.route == "kubernetes":
        from fsdplaunch.cli.launch.kubernetes import launch_on_kubernetes

        return launch_on_kubernetes(loaded, target, launch_options, out)
    if launch_options.route is None:
        from fsdplaunch.cli.launch.ssh import launch_over_ssh

        return launch_over_ssh(loaded, target, launch_options, out)
    return launch_on_slurm(loaded, target, launch_options, out)


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


def plan_elsewhere(
    loaded: LoadedConfig, target: LaunchTarget, *, run_id: str, run_dir: Path, argv: Sequence[str], sent: str
) -> LaunchPlan:
    """The plan of a run whose machines are not known yet; its command is what hands it over.

    Args:
        loaded: The configuration.
        target: What every rank runs.
        run_id: The run's name.
        run_dir: Its folder, absolute.
        argv: The command that hands it over.
        sent: What that command is given to read.
    """
    config = loaded.config
    gpus = count_gpus(config.slurm.gpus_per_node or "") or 0
    said = config.launch.workers_per_node
    if not config.use_cpu and not gpus:
        gpus = said if isinstance(said, int) else 0
    machine = NodeFacts(gpus=gpus, cpus=config.slurm.cpus_per_task or 1, environ=os.environ)
    placed = replace(
        config,
        num_machines=node_range(config)[0],
        machine_rank=0,
        main_process_ip=config.main_process_ip or "machine-0",
        launch=replace(config.launch, workers_per_node=said if gpus or said != "gpu" else 1),
    )
    plan = build_plan(placed, machine=machine, target=target, run_id=run_id, run_dir=run_dir, notes=loaded.notes)
    return replace(plan, argv=tuple(argv), env={}, config=config, notes=loaded.notes, sent=sent)


def snapshot(config: Config, *, log_dir: Path) -> str:
    """The configuration as every machine's launcher gets it: resolved, and without the way it got there."""
    launch = replace(config.launch, log_dir=str(log_dir))
    return render(replace(config, launch=launch, ssh=SshSection()), full=True, comments=False)


def make_run_folder(plan: LaunchPlan, *, files: Mapping[str, str]) -> None:
    """Write the plan, the configuration and what is sent into the run's folder."""
    plan.run_dir.mkdir(parents=True)
    write_json(plan.run_dir / PLAN, plan.to_dict())
    text = snapshot(plan.config, log_dir=plan.run_dir.parent)
    (plan.run_dir / CONFIG).write_text(text, encoding="utf-8")
    for name, content in files.items():
        (plan.run_dir / name).write_text(content, encoding="utf-8")
    latest, fresh = plan.run_dir.parent / "latest", plan.run_dir.parent / f".latest-{os.getpid()}"
    if latest.is_symlink() or not latest.exists():
        fresh.symlink_to(plan.run_dir.name)
        fresh.replace(latest)


def show_sent(plan: LaunchPlan, loaded: LoadedConfig, text: str, *, as_json: bool, out: Output) -> None:
    """Print exactly what would be sent, and what would send it."""
    if as_json:
        data: dict[str, Any] = {"config": str(loaded.path) if loaded.path else None, **plan.to_dict()}
        out.json(data)
        return
    for note in plan.notes:
        out.note(note)
    out.say(f"would run: {' '.join(plan.argv)}")
    out.data(text.rstrip("\n"))
