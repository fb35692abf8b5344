"""`fsdplaunch launch` on one node: what was requested -> plan -> (check, dry run) -> run -> report."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fsdplaunch import __version__
from fsdplaunch.cli.output import Output
from fsdplaunch.config.environment import COMPARED
from fsdplaunch.config.load import LoadedConfig
from fsdplaunch.config.names import closest
from fsdplaunch.config.resolve import mesh_sizes, node_range, runs_spmd, shards_models, shards_on_xla, uses_xla
from fsdplaunch.config.schema.config import Config, all_keys
from fsdplaunch.display_text import counted
from fsdplaunch.errors import UsageError
from fsdplaunch.launch.compared import recall
from fsdplaunch.launch.coordination.network import interface_variables
from fsdplaunch.launch.coordination.run_control import RunControl
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget, NodeFacts, build_plan, join_port
from fsdplaunch.launch.preflight import find_obstacles, is_taken
from fsdplaunch.launch.run_result import RunResult, end_line, failure_lines
from fsdplaunch.launch.schedulers.remote_launchers import launch_words
from fsdplaunch.launch.secret_variables import is_secret
from fsdplaunch.launch.xla import DEVICE, check_groups
from fsdplaunch.probe import torch_version
from fsdplaunch.probe.hardware import Hardware, count_tpu_chips
from fsdplaunch.probe.scheduler import read_cluster
from fsdplaunch.run_dir import run_name

PROGRAM = ("-P", "-m", "fsdplaunch")
"""What follows the interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One launch, as it was requested.

    Attributes:
        loaded: The configuration and where it comes from.
        target: What every rank runs.
        overrides: `KEY=VALUE` texts of the command line.
        dry_run: Print the plan; start nothing.
        check_only: Check this machine; start nothing.
        allow_unsharded: Accept a script that never shards a model.
        show_all: Print variables of the plan that hold defaults, too.
        as_json: Print one JSON object on stdout, and nothing else there.
        route: Hand the run to a scheduler, `slurm` or `kubernetes`, instead of starting it here.
        follow: Show the submitted run's output until it ends.
    """

    loaded: LoadedConfig
    target: LaunchTarget
    overrides: Sequence[str]
    dry_run: bool
    check_only: bool
    allow_unsharded: bool
    show_all: bool
    as_json: bool
    route: str | None
    follow: bool

    @property
    def config(self) -> Config:
        """Return the configuration's values."""
        return self.loaded.config

    @property
    def starts_nothing(self) -> bool:
        """Return whether the launch only shows or checks something."""
        return self.dry_run or self.check_only

    def words(
        self, program: Sequence[str], config: str | None, *, overrides: Sequence[str] = (), as_json: bool = False
    ) -> list[str]:
        """Return the same launch as a command line for another launcher; see `launch_words`."""
        return launch_words(
            program,
            self.target,
            config=config,
            overrides=overrides,
            allow_unsharded=self.allow_unsharded,
            as_json=as_json,
        )


def check_script(script: str | None, command: str = "launch", *, is_file: bool = True) -> str:
    """Return the script; refuse one that is not there before anything is started.

    Args:
        script: As given.
        command: That was given it.
        is_file: It is not a module or a program.

    Raises:
        UsageError: There is none, or it cannot be run.
    """
    if script is None:
        msg = "no script given"
        raise UsageError(msg, hint=f"fsdplaunch {command} train.py [its own arguments]")
    if not is_file:
        return script
    path = Path(script)
    if path.is_dir() and not (path / "__main__.py").is_file():
        msg = f"{script} is a folder, not a script"
        raise UsageError(msg, hint="name the .py file, or use -m for a module")
    if not path.exists():
        msg = f"script not found: {script}"
        beside = [str(one) for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = closest(script, beside)
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

    Args:
        loaded: The configuration.
        hardware: This node.
        target: What every rank runs.
        allow_unsharded: Let a script end without having sharded a model.
        run_id: The run's name; a fresh one when left out.
        folder: This node's folder inside launch.log_dir; named after the run when left out.
        ranks: Workers over all nodes, where they are known.
    """
    name, home = run_name(os.environ)
    run_id, folder = run_id or name, folder or home
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
        run_id=run_id,
        run_dir=Path(loaded.config.launch.log_dir).absolute() / (folder or run_id),
        allow_unsharded=allow_unsharded,
        notes=(*loaded.note_lines(), *hardware.notes),
        ranks=ranks,
    )
    check_groups(loaded.config)
    if node_range(loaded.config)[1] > 1:
        return plan
    return replace(
        plan, env={**interface_variables(loaded.config, "127.0.0.1", os.environ, alone=True), **plan.env}
    )


def with_verdict(plan: LaunchPlan, loaded: LoadedConfig) -> LaunchPlan:
    """Return a plan whose workers say whether the script was compared with one process."""
    verdict = recall(loaded.config, plan.target)
    return replace(plan, env={**plan.env, COMPARED: verdict}) if verdict else plan


def show_plan(plan: LaunchPlan, request: LaunchRequest, out: Output) -> None:
    """Print the plan: one JSON object, or lines that a shell runs, without variables that only hold defaults."""
    loaded = request.loaded
    plan = replace(plan, notes=(*plan.notes, *torch_notes()))
    if request.as_json:
        out.json({"config": str(loaded.path) if loaded.path else None, **plan.to_dict()})
        return
    for note in plan.notes:
        out.note(note)
    defaults = {  # accelerate's defaults of FSDP_* are not ours
        spec.env: spec.key.kind.write(spec.default)
        for spec in all_keys()
        if spec.default is not None and spec.env.startswith(("FSDPLAUNCH_", "ACCELERATE_"))
    }
    usual = () if request.show_all else [name for name in plan.env if plan.env[name] == defaults.get(name)]
    shown = {name: value for name, value in plan.env.items() if name not in usual}
    assignments = (f"{name}={_shown_value(name, value)}" for name, value in shown.items())
    out.data(" \\\n".join(["env", *(f"  {item}" for item in assignments), "  " + shlex.join(plan.argv)]))
    if usual:
        out.say(f"{counted(len(usual), 'variable')} that hold defaults are left out; --all shows them")


def _shown_value(name: str, value: str) -> str:
    """Return a variable's value for a shell; that of a secret is left to the shell, which may have it."""
    return f'"${name}"' if is_secret(name, value) else shlex.quote(value)


def torch_notes() -> list[str]:
    """Return what is to be said of a torch outside of the tested range, where no check of this node says it."""
    found = torch_version.installed_mismatch()
    return [found.note] if found else []


def pass_checks(
    plan: LaunchPlan, hardware: Hardware, out: Output, *, as_json: bool, check_only: bool = False
) -> int:
    """Say what would stop the run here, one line each, and return the status to end with; 0 when it may start."""
    findings = find_obstacles(plan, hardware.gpus)
    fatal = [finding for finding in findings if finding.fatal]
    status = max((finding.error.exit_code for finding in fatal), default=0)
    if as_json and (check_only or fatal):
        out.json(
            {
                "stage": "preflight",
                "exit_code": status,
                "findings": [asdict(finding) for finding in findings],
            }
        )
    for finding in findings:
        if finding.fatal:
            out.error(finding.error)
        else:
            out.note(f"{finding.message}; {finding.hint}")
    if check_only and not fatal:
        elsewhere = "PyTorch/XLA" if plan.device == "xla" else "the CPU"
        place = counted(len(plan.gpus), "GPU") if plan.gpus else elsewhere
        out.say(f"ready: {plan.script} can start with {counted(plan.workers, 'worker')} on {place}")
    return status


def announce(plan: LaunchPlan, loaded: LoadedConfig, out: Output) -> None:
    """Say what starts, with which file, and where its output goes."""
    fsdp = plan.config.fsdp_config
    place = {"cuda": "GPUs, nccl", "xla": f"PyTorch/XLA on {plan.env.get(DEVICE) or os.environ.get(DEVICE)}"}
    nodes = f" of {plan.world_size} on {plan.nodes} nodes" if plan.nodes > 1 else ""
    out.say(f"fsdplaunch {__version__}  run {plan.run_id}  config {_source(loaded)}")
    if shards_on_xla(plan.config):
        way = "xla_fsdp_v2 (SPMD)" if runs_spmd(plan.config) else "XlaFullyShardedDataParallel"
        how = f"{way}, {fsdp.fsdp_auto_wrap_policy}"
    elif shards_models(plan.config):
        how = f"FSDP{fsdp.fsdp_version} {fsdp.fsdp_sharding_strategy}, {fsdp.fsdp_auto_wrap_policy}{_layers(plan)}"
    else:
        how = f"{plan.config.distributed_type}, not sharded"
    precision = plan.config.precision.param or "the model's own precision"
    out.say(
        f"  {counted(plan.workers, 'worker')}{nodes} ({place.get(plan.device, 'CPU, gloo')}), {how}, {precision}"
    )
    out.say(
        out.dim(f"  logs {short_path(plan.run_dir)}, stop with Ctrl-C (once: let the workers end; twice: now)")
    )
    for note in plan.notes:
        out.note(note)


def _layers(plan: LaunchPlan) -> str:
    """Return what of the mesh goes beyond FSDP: how many ranks split each layer, and each sequence."""
    sizes = mesh_sizes(plan.config, plan.world_size)
    layers = f", layers split over {sizes.tensor}" if sizes.tensor > 1 else ""
    return layers + (f", sequences over {sizes.context}" if sizes.context > 1 else "")


def _source(loaded: LoadedConfig) -> str:
    """Return the file, and how many keys other layers have changed."""
    layers = [origin.layer for origin in loaded.origins.values()]
    words = {"env": "the environment", "flag": "the command line"}
    changed = [f"{layers.count(layer)} from {name}" for layer, name in words.items() if layer in layers]
    file = str(loaded.path) if loaded.path else "none, built-in defaults (fsdplaunch config writes one)"
    return f"{file} ({', '.join(changed)})" if changed and loaded.path else file


def run_and_report(plan: LaunchPlan, loaded: LoadedConfig, *, as_json: bool, out: Output) -> int:
    """Run the plan, say how it began and ended, and return the status to exit with."""
    announce(plan, loaded, out)
    result = run_shown(plan, as_json=as_json, out=out)
    report(result, plan, as_json=as_json, out=out)
    return result.exit_code


def run_shown(plan: LaunchPlan, *, as_json: bool, out: Output, control: RunControl | None = None) -> RunResult:
    """Run the plan and say which signals are passed on; with `as_json`, stdout is left to the result alone."""
    from fsdplaunch.launch.runner import run_plan

    output = sys.stderr.fileno() if as_json else None
    return run_plan(plan, output=output, on_signal=signal_printer(plan, out), control=control)


def signal_printer(plan: LaunchPlan, out: Output) -> Callable[[int, int], None]:
    """Return what says that a signal was passed on."""

    def say(number: int, count: int) -> None:
        name = signal.Signals(number).name
        if count == 1:
            grace = plan.config.launch.shutdown_grace_seconds
            workers = counted(plan.workers, "worker")
            out.say(f"{name}: asked {workers} to end, within {grace:.0f} s; again to kill them")
        else:
            out.say(f"{name}: killing the workers")

    return say


def report(result: RunResult, plan: LaunchPlan, *, as_json: bool, out: Output, is_part: bool = False) -> None:
    """Say how the run ended.

    Args:
        result: The end of the run.
        plan: What was run.
        as_json: Print the result as JSON, too.
        out: Where words go.
        is_part: Node 0 prints the report; this node says in a line how it ended.
    """
    if as_json:
        out.json({"run_id": plan.run_id, "run_dir": str(plan.run_dir), **result.to_dict()})
    place = short_path(plan.run_dir)
    if result.unwritten is not None:
        out.note(f"{place} does not hold how the run ended: {result.unwritten}")
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
