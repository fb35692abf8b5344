"""`fsdplaunch launch`: which way a run starts, here, on several nodes, or handed to something else."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdplaunch.cli import single_node
from fsdplaunch.cli.key_options import option_notes
from fsdplaunch.cli.output import Output
from fsdplaunch.cli.single_node import LaunchRequest
from fsdplaunch.config.load import LoadedConfig, load_config
from fsdplaunch.config.resolve import uses_xla
from fsdplaunch.errors import MachineError, UsageError
from fsdplaunch.launch.coordination.placement import assumed_settings, find_placement
from fsdplaunch.launch.plan import LaunchTarget
from fsdplaunch.probe.hardware import pod_settings, read_hardware


def launch_script(
    script: str | None,
    arguments: Sequence[str],
    *,
    file: Path | None,
    overrides: Sequence[str],
    module: bool,
    no_python: bool,
    slurm: bool,
    kubernetes: bool,
    noted: Sequence[str],
    out: Output,
    **options: Any,
) -> int:
    """Run a script on every worker, or show what would be run; `options` go to `LaunchRequest`.

    The status is 0, or the first failing rank's own, or 128 + n when a signal n ended the run.
    """
    if slurm and kubernetes:
        msg = "--slurm and --kubernetes name two schedulers"
        raise UsageError(msg, hint="leave one of them out")
    if options["follow"] and not (slurm or kubernetes):
        msg = "--follow is for submitted runs"
        raise UsageError(msg, hint="add --slurm or --kubernetes; a run that starts here shows its output anyway")
    if options["live"] and (slurm or kubernetes):
        out.note("--live shows a run that starts here; fsdplaunch watch shows one that was submitted")
    route = "slurm" if slurm else "kubernetes" if kubernetes else None
    name = single_node.check_script(script, is_file=not (no_python or module))
    target = LaunchTarget(name=name, arguments=tuple(arguments), is_module=module, is_python=not no_python)
    assumed = () if route else assumed_settings(os.environ)
    notes = option_notes(noted)
    loaded = load_config(file, overrides=overrides, assumed=assumed, noted=notes)
    if not route and (pod := _assumed_of_pod(loaded)):
        loaded = load_config(file, overrides=overrides, assumed=(*assumed, *pod), noted=notes)
    request = LaunchRequest(loaded=loaded, target=target, overrides=overrides, **options)
    if route or loaded.config.ssh.hosts or loaded.config.ssh.hostfile:
        return _launch_elsewhere(request, route, out)
    hardware, place = read_hardware(os.environ), find_placement(loaded.config, os.environ)
    if place.most > 1:
        from fsdplaunch.cli.multi_node import launch_on_node

        return launch_on_node(request, place, hardware, out)
    plan = single_node.plan_for_this_node(loaded, hardware, target, allow_unsharded=request.allow_unsharded)
    plan = single_node.with_verdict(plan, loaded)
    if request.dry_run:
        single_node.show_plan(plan, request, out)
        return 0
    status = single_node.pass_checks(plan, hardware, out, as_json=request.as_json, check_only=request.check_only)
    if status or request.check_only:
        return status
    single_node.announce(plan, loaded, out)
    result = single_node.run_shown(plan, as_json=request.as_json, out=out, live=request.live)
    single_node.report(result, plan, as_json=request.as_json, out=out)
    return result.exit_code


def _assumed_of_pod(loaded: LoadedConfig) -> tuple[str, ...]:
    """Return what the variables of a TPU pod say; nothing where no TPU is used, or the user says it instead."""
    if not uses_xla(loaded.config) or loaded.config.use_cpu:
        return ()
    try:
        return pod_settings(os.environ)
    except MachineError:
        if loaded.origins["num_machines",].layer == "default":
            raise
        return ()


def _launch_elsewhere(request: LaunchRequest, route: str | None, out: Output) -> int:
    from fsdplaunch.cli.handoff import launch_on_kubernetes, launch_on_slurm, launch_over_ssh

    ssh = request.config.ssh
    if route is None:
        return launch_over_ssh(request, out)
    if ssh.hosts or ssh.hostfile:
        named = "ssh.hosts" if ssh.hosts else "ssh.hostfile"
        msg = f"--{route} submits the run to a scheduler, but {named} names nodes to start it on"
        raise UsageError(msg, hint=f"leave out --{route}, or {named}")
    return (launch_on_slurm if route == "slurm" else launch_on_kubernetes)(request, out)
