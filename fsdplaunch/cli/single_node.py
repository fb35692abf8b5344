"""`fsdplaunch launch` on one node: what was requested -> plan -> (check, dry run) -> run -> report."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdplaunch import __version__
from fsdplaunch.cli.output import Output
from fsdplaunch.config.environment import COMPARED
from fsdplaunch.config.load import LoadedConfig
from fsdplaunch.config.names import closest
from fsdplaunch.config.resolve import mesh_sizes, node_range, runs_spmd, shards_models, shards_on_xla, uses_xla
from fsdplaunch.config.schema.config import Config, all_keys
from fsdplaunch.display_text import counted
from fsdplaunch.errors import UsageError
from fsdplaunch.features import WATCH, feature
from fsdplaunch.launch.compared import recall
from fsdplaunch.launch.coordination.network import interface_variables
from fsdplaunch.launch.plan import (
    XLA_DEVICE,
    LaunchPlan,
    LaunchTarget,
    NodeFacts,
    build_plan,
    check_groups,
    join_port,
)
from fsdplaunch.launch.preflight import find_obstacles, is_taken
from fsdplaunch.probe import torch_version
from fsdplaunch.probe.hardware import Hardware, count_tpu_chips
from fsdplaunch.probe.scheduler import read_cluster
from fsdplaunch.run_dir import run_name

if TYPE_CHECKING:
    from fsdplaunch.launch.coordination.run_control import RunControl
    from fsdplaunch.launch.run_result import RunResult

PROGRAM = ("-P", "-m", "fsdplaunch")
"""What follows the interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One launch, as it was requested."""

    loaded: LoadedConfig
    target: LaunchTarget
    overrides: Sequence[str]  # `KEY=VALUE` texts of the command line
    dry_run: bool
    check_only: bool
    allow_unsharded: bool  # accept a script that never shards a model
    show_all: bool  # print variables of the plan that hold defaults, too
    as_json: bool  # print one JSON object on stdout, and nothing else there
    follow: bool  # show a submitted run's output until it ends
    live: bool  # show what the ranks do below their output

    @property
    def config(self) -> Config:
        """Return the configuration's values."""
        return self.loaded.config

    @property
    def file(self) -> str | None:
        """Return the configuration's file; None for the built-in defaults."""
        return str(self.loaded.path) if self.loaded.path else None

    def words(
        self, program: Sequence[str], config: str | None, *, overrides: Sequence[str] = (), as_json: bool = False
    ) -> list[str]:
        """Return the same launch as a command line for another launcher."""
        target = self.target
        flags = [
            *(["--json"] if as_json else []),
            *(["--config", config] if config else []),
            *(word for override in overrides for word in ("--set", override)),
            *(["--module"] if target.is_module else []),
            *([] if target.is_python else ["--no-python"]),
            *(["--allow-unsharded"] if self.allow_unsharded else []),
        ]
        end = ["--"] if target.name.startswith("-") else []
        return [*program, "launch", *flags, *end, target.name, *target.arguments]


def check_script(script: str | None, command: str = "launch", *, is_file: bool = True) -> str:
    """Return the script of a command; refuse one that is not there before anything is started."""
    if script is None:
        msg = "no script given"
        raise UsageError(msg, hint=f"fsdplaunch {command} train.py [its own arguments]")
    if not is_file:  # a module, or a program
        return script
    path = Path(script)
    if path.is_dir() and not (path / "__main__.py").is_file():
        msg = f"{script} is a folder, not a script"
        raise UsageError(msg, hint="name the .py file, or use -m for a module")
    if not path.exists():
        msg = f"script not found: {script}"
        near = closest(script, list(map(str, path.parent.glob("*.py"))))
        near = near or closest(path.name, list(map(str, Path().glob("*.py"))))
        raise UsageError(msg, hint=f"did you mean {near[0]}?" if near else f"looked in {Path.cwd()}")
    if path.suffix == ".py" and not os.access(path, os.R_OK):
        msg = f"{script} cannot be read: permission denied"
        raise UsageError(msg)
    return script


def plan_for_this_node(
    loaded: LoadedConfig,
    hardware: Hardware,
    target: LaunchTarget,
    *,
    allow_unsharded: bool,
    run_id: str | None = None,
    folder: Path | None = None,
    ranks: int | None = None,
) -> LaunchPlan:
    """Build the plan with this node's facts and an absolute run folder.

    Left out, the run's name is a fresh one, and the folder, this node's inside of launch.log_dir, has that name.
    """
    name, home = run_name(os.environ)
    node = NodeFacts(
        gpus=[gpu.visible_name for gpu in hardware.gpus],
        cpus=hardware.cpu_count,
        has_amd=hardware.has_amd,
        tpu_chips=count_tpu_chips() if uses_xla(loaded.config) else 0,
        port_is_taken=loaded.config.num_machines == 1 and is_taken(join_port(loaded.config)),
        environ=os.environ,
    )
    plan = build_plan(
        loaded.config,
        node=node,
        target=target,
        run_id=run_id or name,
        run_dir=Path(loaded.config.launch.log_dir).absolute() / (folder or home),
        allow_unsharded=allow_unsharded,
        notes=(*loaded.note_lines(), *hardware.notes),
        ranks=ranks,
    )
    plan = replace(plan, origins=loaded.places())
    check_groups(loaded.config)
    if node_range(loaded.config)[1] > 1:
        return plan
    alone = interface_variables(loaded.config, "127.0.0.1", os.environ, alone=True)
    return replace(plan, env={**alone, **plan.env})


def with_verdict(plan: LaunchPlan, loaded: LoadedConfig) -> LaunchPlan:
    """Return a plan whose workers say whether the script was compared with one process."""
    verdict = recall(loaded.config, plan.target)
    return replace(plan, env={**plan.env, COMPARED: verdict}) if verdict else plan


def show_plan(plan: LaunchPlan, request: LaunchRequest, out: Output) -> None:
    """Print the plan: one JSON object, or lines that a shell runs, without variables that only hold defaults."""
    plan = replace(plan, notes=(*plan.notes, *torch_notes()))
    if request.as_json:
        out.json({"config": request.file, **plan.to_dict()})
        return
    for note in plan.notes:
        out.note(note)
    defaults = {  # accelerate's defaults of FSDP_* are not ours
        spec.env: spec.key.kind.write(spec.default)
        for spec in all_keys()
        if spec.default is not None and spec.env.startswith(("FSDPLAUNCH_", "ACCELERATE_"))
    }
    usual = () if request.show_all else [name for name in plan.env if plan.env[name] == defaults.get(name)]
    lines = ["env"]
    for name, value in plan.env.items():
        if name not in usual:  # the value of a secret is left to the shell, which may have it
            lines.append(f"  {name}=" + (f'"${name}"' if plan.hides(name) else shlex.quote(value)))
    out.data(" \\\n".join([*lines, "  " + shlex.join(plan.argv)]))
    if usual:
        out.say(f"{counted(len(usual), 'variable')} that hold defaults are left out; --all shows them")


def torch_notes() -> list[str]:
    """Return what is to be said of a torch outside of the tested range, where no check of this node says it."""
    found = torch_version.installed_mismatch()
    return [found.note] if found else []


def pass_checks(
    plan: LaunchPlan, hardware: Hardware, out: Output, *, as_json: bool, check_only: bool = False
) -> int:
    """Say what would stop the run here, one line each, and return the status to end with; 0 when it may start."""
    findings = find_obstacles(plan, hardware)
    fatal = [finding for finding in findings if finding.fatal]
    status = max((finding.error.exit_code for finding in fatal), default=0)
    if as_json and (check_only or fatal):
        found = [asdict(finding) for finding in findings]
        out.json({"stage": "preflight", "exit_code": status, "findings": found})
    for finding in findings:
        if finding.fatal:
            out.error(finding.error)
        else:
            out.note(f"{finding.message}; {finding.hint}")
    for note in plan.notes if check_only else ():
        out.note(note)
    if check_only and not fatal:
        elsewhere = "PyTorch/XLA" if plan.device == "xla" else "the CPU"
        place = counted(len(plan.gpus), "GPU") if plan.gpus else elsewhere
        out.say(f"ready: {plan.script} can start with {counted(plan.workers, 'worker')} on {place}")
    return status


def announce(plan: LaunchPlan, loaded: LoadedConfig, out: Output) -> None:
    """Say what starts, with which file and how many keys that other layers have changed, and where output goes."""
    config, fsdp = plan.config, plan.config.fsdp_config
    layers = [origin.layer for origin in loaded.origins.values()]
    words = {"env": "the environment", "flag": "the command line"}
    changed = [f"{layers.count(layer)} from {name}" for layer, name in words.items() if layer in layers]
    file = str(loaded.path) if loaded.path else "none, built-in defaults (fsdplaunch config writes one)"
    file += f" ({', '.join(changed)})" if changed and loaded.path else ""
    out.say(f"fsdplaunch {__version__}  run {plan.run_id}  config {file}")
    if shards_on_xla(config):
        way = "xla_fsdp_v2 (SPMD)" if runs_spmd(config) else "XlaFullyShardedDataParallel"
        how = f"{way}, {fsdp.fsdp_auto_wrap_policy}"
    elif shards_models(config):
        sizes = mesh_sizes(config, plan.world_size)
        how = f"FSDP{fsdp.fsdp_version} {fsdp.fsdp_sharding_strategy}, {fsdp.fsdp_auto_wrap_policy}"
        how += f", layers split over {sizes.tensor}" if sizes.tensor > 1 else ""
        how += f", sequences over {sizes.context}" if sizes.context > 1 else ""
    else:
        how = f"{config.distributed_type}, not sharded"
    place = {
        "cuda": "GPUs, nccl",
        "xla": f"PyTorch/XLA on {plan.env.get(XLA_DEVICE) or os.environ.get(XLA_DEVICE)}",
    }
    nodes = f" of {plan.world_size} on {plan.nodes} nodes" if plan.nodes > 1 else ""
    workers = f"{counted(plan.workers, 'worker')}{nodes} ({place.get(plan.device, 'CPU, gloo')})"
    precision = config.precision.param or "the model's own precision"
    out.say(f"  {workers}, {how}, {precision}")
    stop = "stop with Ctrl-C (once: let the workers end; twice: now)"
    out.say(out.dim(f"  logs {short_path(plan.run_dir)}, {stop}"))
    for note in plan.notes:
        out.note(note)


def run_shown(
    plan: LaunchPlan, *, as_json: bool, out: Output, control: RunControl | None = None, live: bool = False
) -> RunResult:
    """Run the plan and say which signals are passed on; with `as_json`, stdout is left to the result alone."""
    from fsdplaunch.launch.runner import run_plan

    def say(number: int, count: int) -> None:
        name = signal.Signals(number).name
        if count == 1:
            grace = plan.config.launch.shutdown_grace_seconds
            workers = counted(plan.workers, "worker")
            out.say(f"{name}: asked {workers} to end within {grace:.0f} s; repeat to kill them")
        else:
            out.say(f"{name}: killing the workers")

    with feature(WATCH).live_view(plan.run_dir, out) if live else nullcontext():
        return run_plan(plan, output=sys.stderr.fileno() if as_json else None, on_signal=say, control=control)


def report(result: RunResult, plan: LaunchPlan, *, as_json: bool, out: Output, is_part: bool = False) -> None:
    """Say how the run ended; where this node is a part of it, in a line, as node 0 prints the report."""
    from fsdplaunch.launch.run_result import end_line, failure_lines

    if as_json:
        out.json({"run_id": plan.run_id, "run_dir": str(plan.run_dir), **result.to_dict()})
    place = short_path(plan.run_dir)
    if result.unwritten is not None:
        out.note(f"{place} lacks the record of how the run ended: {result.unwritten}")
    if result.start is not None:
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in result.start.items())
        out.say(f"the last worker's script started after {sum(result.start.values()):.2f} s: {parts}")
    if result.summary is not None and not is_part:
        from fsdplaunch.launch.step_summary import end_lines

        for line in end_lines(result.summary):
            out.say(f"  {line}")
    if result.failure is None:
        out.say(end_line(result, workers=plan.world_size))
    elif is_part:
        head, *rest = failure_lines(result, run_dir=place)
        where = next((line.strip() for line in rest if line.startswith("  on ")), "")
        out.failure([f"{head} {where}".rstrip() + "; node 0 has the report"])
    else:
        fixed_size = read_cluster(os.environ).kind in ("slurm", "kubernetes")
        out.failure(failure_lines(result, run_dir=place, folder=str(Path.cwd()), fixed_size=fixed_size))


def short_path(path: Path) -> str:
    """Return the path as seen from here, when that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
