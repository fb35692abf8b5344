"""`fsdplaunch launch`: load -> plan -> (dry run) -> run -> report."""

import os
import secrets
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from fsdplaunch import __version__
from fsdplaunch.cli.output import Output
from fsdplaunch.config.load import Loaded, load_config
from fsdplaunch.errors import UsageError
from fsdplaunch.launch.plan import LaunchPlan, Machine, build_plan
from fsdplaunch.launch.result import RunResult, failure_lines
from fsdplaunch.probe.hardware import read_hardware


def launch_script(
    script: str | None,
    arguments: Sequence[str],
    *,
    file: Path | None,
    overrides: Sequence[str],
    module: bool,
    dry_run: bool,
    allow_unsharded: bool,
    as_json: bool,
    out: Output,
) -> int:
    """Run a script on every worker, or show what would be run.

    Returns:
        0, or the first failing rank's own status, or 128 + n when a signal n ended the run.

    Raises:
        LaunchError: Before anything was started.
    """
    if script is None:
        msg = "no script given"
        raise UsageError(msg, hint="fsdplaunch launch train.py [its own arguments]")
    if not module:
        check_script(script)
    loaded = load_config(file, overrides=overrides)
    plan = plan_for_this_machine(loaded, script, arguments, module=module, allow_unsharded=allow_unsharded)
    if dry_run:
        show_plan(plan, loaded, as_json=as_json, out=out)
        return 0
    announce(plan, loaded, out)
    from fsdplaunch.launch.runner import run_plan

    result = run_plan(plan)
    report(result, plan, as_json=as_json, out=out)
    return result.exit_code


def check_script(script: str) -> None:
    """Refuse a script that is not there before anything is started."""
    path = Path(script)
    if path.is_dir() and not (path / "__main__.py").is_file():
        msg = f"{script} is a folder, not a script"
        raise UsageError(msg, hint="name the .py file, or use -m for a module")
    if not path.exists():
        msg = f"script not found: {script}"
        raise UsageError(msg, hint=f"looked in {Path.cwd()}")


def plan_for_this_machine(
    loaded: Loaded, script: str, arguments: Sequence[str], *, module: bool, allow_unsharded: bool
) -> LaunchPlan:
    """Build the plan with this machine's facts, a fresh run id and an absolute run folder."""
    hardware = read_hardware(os.environ)
    run_id = f"{time.strftime('%Y-%m-%d_%H%M%S')}-{secrets.token_hex(2)}"
    return build_plan(
        loaded.config,
        machine=Machine(gpus=len(hardware.gpus), cpus=hardware.cpu_count, environ=os.environ),
        script=script,
        arguments=arguments,
        module=module,
        run_id=run_id,
        run_dir=Path(loaded.config.launch.log_dir).absolute() / run_id,
        allow_unsharded=allow_unsharded,
        notes=(*loaded.notes, *hardware.notes),
    )


def show_plan(plan: LaunchPlan, loaded: Loaded, *, as_json: bool, out: Output) -> None:
    """Print the plan: one JSON object, or lines that a shell runs."""
    if as_json:
        out.json({"config": str(loaded.path) if loaded.path else None, **plan.to_dict()})
        return
    for note in plan.notes:
        out.note(note)
    assignments = (f"{name}={shlex.quote(value)}" for name, value in plan.env.items())
    out.data(" \\\n".join(["env", *(f"  {item}" for item in assignments), "  " + shlex.join(plan.argv)]))


def announce(plan: LaunchPlan, loaded: Loaded, out: Output) -> None:
    """Say what starts, with which file, and where its output goes."""
    source = str(loaded.path) if loaded.path else "none, built-in defaults (fsdplaunch config writes one)"
    fsdp = plan.config.fsdp_config
    place = "GPUs, nccl" if plan.device == "cuda" else "CPU, gloo"
    nodes = f" on each of {plan.nodes} machines" if plan.nodes > 1 else ""
    out.say(f"fsdplaunch {__version__}  run {plan.run_id}  config {source}")
    if plan.config.distributed_type == "FSDP":
        how = f"FSDP{fsdp.fsdp_version} {fsdp.fsdp_sharding_strategy}, {fsdp.fsdp_auto_wrap_policy}"
    else:
        how = f"{plan.config.distributed_type}, not sharded"
    precision = plan.config.precision.param or "the model's own precision"
    out.say(f"  {plan.workers} workers{nodes} ({place}), {how}, {precision}")
    out.say(out.dim(f"  logs {_short(plan.run_dir)}, stop with Ctrl-C"))
    for note in plan.notes:
        out.note(note)


def report(result: RunResult, plan: LaunchPlan, *, as_json: bool, out: Output) -> None:
    """Say how the run ended."""
    if as_json:
        out.json({"run_id": plan.run_id, "run_dir": str(plan.run_dir), **result.to_dict()})
    if result.failure is not None:
        out.failure(failure_lines(result, script=plan.script, run_dir=_short(plan.run_dir)))
    elif result.stopped_by is not None:
        out.say(f"stopped by {result.stopped_by} after {result.seconds:.0f} s")
    else:
        out.say(f"finished in {result.seconds:.0f} s, {plan.world_size} workers")


def _short(path: Path) -> str:
    """The path as seen from here, when that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
