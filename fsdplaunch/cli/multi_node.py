"""`fsdplaunch launch` on several nodes: join the others, run this node's part, report one end."""

import os
import shlex
import sys
from dataclasses import replace

from fsdplaunch.cli import single_node
from fsdplaunch.cli.output import Output
from fsdplaunch.cli.single_node import PROGRAM, LaunchRequest
from fsdplaunch.config.load import LoadedConfig
from fsdplaunch.display_text import counted, listed
from fsdplaunch.errors import LaunchError, MachineError
from fsdplaunch.launch.coordination import join, network
from fsdplaunch.launch.coordination.join import agreed_config, provisional_config
from fsdplaunch.launch.coordination.network import interface_variables
from fsdplaunch.launch.coordination.placement import NodePlacement, is_coordinator, is_step
from fsdplaunch.launch.coordination.run_control import JoinProgress, RunAssignment, RunControl
from fsdplaunch.launch.coordination.secret_source import SecretSource, find_secret
from fsdplaunch.launch.plan import LaunchPlan
from fsdplaunch.launch.preflight import find_obstacles
from fsdplaunch.launch.schedulers import shared_overrides
from fsdplaunch.launch.schedulers.slurm import srun_words
from fsdplaunch.launch.secret_variables import as_variable, without_variable_overrides
from fsdplaunch.probe.hardware import Hardware
from fsdplaunch.run_dir import GROUP_RUN, has_fixed_name, node_folder, run_name
from fsdplaunch.run_secret import SECRET, make_secret

_NAMED = 16
HOPELESS_SECONDS = 5.0
"""How long a node that cannot start tries to reach the others."""


def launch_on_node(request: LaunchRequest, place: NodePlacement, hardware: Hardware, out: Output) -> int:
    """Run this node's part of a run on several nodes; return the run's status."""
    loaded, config = request.loaded, request.config
    if "SLURM_JOB_ID" in os.environ and not is_step(os.environ) and not (request.dry_run or request.check_only):
        # Have srun start a launcher on each node, in a batch script or an interactive allocation.
        starter = srun_words(config, os.environ, place.least)
        out.say(f"starting a launcher on each of {place.least} nodes: {shlex.join(starter)} ...")
        sys.stderr.flush()
        open_ones, hidden = without_variable_overrides(shared_overrides(request.overrides))
        program = [sys.executable, *PROGRAM]
        words = request.words(program, request.file, overrides=open_ones, as_json=request.as_json)
        # srun hands the environment on
        os.environ.update({SECRET: make_secret(), **os.environ, **(as_variable(config) if hidden else {})})
        os.execvp(starter[0], [*starter, *words])  # noqa: S606  (no shell; our words)
    is_first = is_coordinator(place)
    address = network.own_address() if is_first and place.host is None else place.host or ""
    before = provisional_config(config, place, address=address)
    plan = _plan(request, hardware, replace(loaded, config=before), rank=before.machine_rank or 0)
    if request.dry_run:
        single_node.show_plan(plan, request, out)
        return 0
    if request.check_only:
        return single_node.pass_checks(plan, hardware, out, as_json=request.as_json, check_only=True)
    secret = find_secret(config, place, os.environ, address=address)
    try:
        control = _join(request, place, plan, hardware, secret, out)
        agreed = replace(loaded, config=agreed_config(config, control.assignment))
        rank, assignment = control.assignment.rank, control.assignment
        plan = _plan(request, hardware, agreed, rank=rank, assignment=assignment)
        return _run(plan, agreed, control, as_json=request.as_json, live=request.live, out=out)
    finally:
        secret.withdraw()


def _plan(
    request: LaunchRequest,
    hardware: Hardware,
    loaded: LoadedConfig,
    *,
    rank: int,
    assignment: RunAssignment | None = None,
) -> LaunchPlan:
    run_id, home = run_name(os.environ)
    if assignment:
        run_id = assignment.run_id
        home = home if has_fixed_name(os.environ) else home.with_name(run_id)
    plan = single_node.plan_for_this_node(
        loaded,
        hardware,
        request.target,
        allow_unsharded=request.allow_unsharded,
        run_id=run_id,
        folder=node_folder(home, rank),
        ranks=assignment.world if assignment else None,
    )
    plan = single_node.with_verdict(plan, loaded)
    address = assignment.address if assignment else loaded.config.launch.local_address
    if not address:
        return plan
    return replace(plan, env={**plan.env, **interface_variables(loaded.config, address, os.environ)})


def _join(
    request: LaunchRequest,
    place: NodePlacement,
    plan: LaunchPlan,
    hardware: Hardware,
    secret: SecretSource,
    out: Output,
) -> RunControl:
    """Meet the other nodes; what keeps this one from starting is an error on all of them.

    On node 0, an address that is not this machine's is one at once: nobody could be informed.
    """
    config, is_first = request.config, is_coordinator(place)
    obstacles: list[LaunchError] = [one.error for one in find_obstacles(plan, hardware) if one.fatal]
    try:
        join.check_interface(config)
    except MachineError as error:
        if is_first:
            raise
        obstacles.insert(0, error)
    if obstacles:  # try to let the others know, but not for long
        config = replace(config, launch=replace(config.launch, rendezvous_timeout_seconds=HOPELESS_SECONDS))
    spec = join.NodeSpec(
        config=config,
        place=place,
        target=request.target,
        workers=plan.workers,
        obstacles=[f"{obstacle.message}\n{obstacle.hint}" for obstacle in obstacles],
        run_id=plan.run_id,
        fixed_run_id=has_fixed_name(os.environ),
        secret=secret,
    )
    if is_first and join.takes_in_others(place):
        _say_how_to_join(request, spec, out)
    live = out.live if sys.stderr is not None and sys.stderr.isatty() and not out.quiet else None
    try:
        return join.join_run(spec, JoinProgress(say=out.say, live=live), out.note)
    except MachineError:
        if obstacles:
            raise obstacles[0] from None
        raise


def _say_how_to_join(request: LaunchRequest, spec: join.NodeSpec, out: Output) -> None:
    place, config = spec.place, request.config
    if place.source != "the configuration" or GROUP_RUN in os.environ:
        return
    address = join.own_address(spec)
    is_set = config.main_process_ip or config.launch.rendezvous_endpoint
    where = [] if is_set else [f"main_process_ip={address}"]
    if not is_set and config.main_process_port is None and place.port:
        where.append(f"main_process_port={place.port}")
    open_ones, hidden = without_variable_overrides(shared_overrides(request.overrides))
    also = f" and with the same --set {', '.join(f'{key}=...' for key in hidden)}" if hidden else ""
    count, may_vary = place.most - 1, place.most > place.least
    others = f"each of {'up to ' if may_vary else 'the '}{count} other nodes"
    if count == 1:
        others = "another node" if may_vary else "the other node"
    out.say(f"node 0 waits at {address}:{place.port}; on {others} run, in the same folder{also}:")
    words = request.words(["fsdplaunch"], request.file, overrides=[*where, *open_ones])
    out.say(f"  {SECRET}={spec.secret.offer()} {shlex.join(words)}")


def _run(
    plan: LaunchPlan, loaded: LoadedConfig, control: RunControl, *, as_json: bool, live: bool, out: Output
) -> int:
    assignment = control.assignment
    is_first = assignment.rank == 0
    for note in assignment.notes:
        out.note(note)
    if is_first:
        for note in single_node.torch_notes():  # the nodes agree on the version
            out.note(note)
        single_node.announce(plan, loaded, out)
        out.say(f"  nodes {listed(assignment.names, _NAMED)}")
    else:
        names = f"node {assignment.rank} of {assignment.nodes} in run {assignment.run_id}"
        out.say(f"{names}: {counted(plan.workers, 'worker')} here, node 0 is {assignment.names[0]}")
    result = single_node.run_shown(plan, as_json=as_json, out=out, control=control, live=live)
    single_node.report(result, plan, as_json=as_json, out=out, is_part=not is_first)
    return result.exit_code
