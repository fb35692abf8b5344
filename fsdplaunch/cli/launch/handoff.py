"""What a run that starts elsewhere is handed over as: its plan, its folder, and what --dry-run shows of it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdplaunch.cli.output import Output
from fsdplaunch.config.load.load import LoadedConfig
from fsdplaunch.config.schema.config import Config, SshSection
from fsdplaunch.config.world_size import node_range
from fsdplaunch.config.write.render import render
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget, NodeFacts, build_plan
from fsdplaunch.probe.scheduler import count_gpus
from fsdplaunch.run_dir import CONFIG, PLAN, point_latest, write_json

PROGRAM = ("-P", "-m", "fsdplaunch")
"""What follows the interpreter."""


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
    point_latest(plan.run_dir)


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
