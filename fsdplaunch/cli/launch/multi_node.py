"""`fsdplaunch launch` on several machines: meet the others, run this machine's part, report one end."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdplaunch.cli.launch import single_node
from fsdplaunch.cli.launch.options import LaunchOptions
from fsdplaunch.cli.output import Output
from fsdplaunch.config.load.load import LoadedConfig
from fsdplaunch.errors import EXIT_MACHINE, MachineError, UsageError
from fsdplaunch.launch.coordination import join, network
from fsdplaunch.launch.coordination.interfaces import JoinProgress, RunAssignment, RunControl
from fsdplaunch.launch.coordination.node_config import agreed_config, node_folder, provisional_config
from fsdplaunch.launch.coordination.placement import Placement, is_coordinator, is_step
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget
from fsdplaunch.launch.preflight import find_obstacles
from fsdplaunch.launch.report.run_result import RunResult
from fsdplaunch.launch.run_id import GROUP_RUN, has_fixed_name, run_name
from fsdplaunch.launch.schedulers.launch_command import LaunchCommand, shared_overrides
from fsdplaunch.launch.schedulers.slurm.commands import in_job, srun_words
from fsdplaunch.probe.hardware import Hardware

HOPELESS_SECONDS = 5.0
"""How long a machine that cannot start tries to tell the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLaunch:
    """What this machine was asked for.

    Attributes:
        loaded: The configuration and where it comes from.
        place: Which machine this is, as far as it is known.
        target: What the workers run.
        hardware: This machine.
        launch_options: What the command line asks for.
        overrides: `KEY=VALUE` texts of the command line.
    """

    loaded: LoadedConfig
    place: Placement
    target: LaunchTarget
    hardware: Hardware
    launch_options: LaunchOptions
    overrides: Sequence[str]


def launch_on_node(part: NodeLaunch, out: Output) -> int:
    """Run this machine's part of a run on several machines; returns the run's status.

    Raises:
        LaunchError: Before anything was started.
    """
    config, place, launch_options = part.loaded.config, part.place, part.launch_options
    if in_job() and not is_step(os.environ) and not (launch_options.dry_run or launch_options.check_only):
        return _start_on_every_machine(part, out)
    is_first = is_coordinator(place)
    address = network.own_address() if is_first and place.host is None else place.host or ""
    before = provisional_config(config, place, address=address)
    plan = _plan(part, replace(part.loaded, config=before), rank=before.machine_rank or 0)
    if launch_options.dry_run:
        single_node.show_plan(plan, part.loaded, as_json=launch_options.as_json, out=out)
        return 0
    if launch_options.check_only:
        return 0 if single_node.pass_checks(plan, part.hardware, launch_options, out) else EXIT_MACHINE
    if not config.launch.meeting:
        return _run_unmet(part, plan, out)
    link = _meet(part, plan, is_first=is_first, out=out)
    agreed = replace(part.loaded, config=agreed_config(config, link.assignment))
    final_plan = _plan(part, agreed, rank=link.assignment.rank, assignment=link.assignment)
    return _run(final_plan, agreed, link, part, out)


def _start_on_every_machine(part: NodeLaunch, out: Output) -> int:
    """In a batch script or an interactive allocation: have srun start a launcher on each machine."""
    order = LaunchCommand(
        target=part.target,
        config=str(part.loaded.path) if part.loaded.path else None,
        overrides=shared_overrides(part.overrides),
        allow_unsharded=part.launch_options.allow_unsharded,
    )
    json_flag = ["--json"] if part.launch_options.as_json else []
    program = [sys.executable, "-P", "-m", "fsdplaunch"]
    words = order.words(program)
    words[len(program) + 1 : len(program) + 1] = json_flag
    starter = srun_words(part.loaded.config, os.environ, part.place.least)
    out.say(f"starting a launcher on each of {part.place.least} machines: {shlex.join(starter)} ...")
    sys.stderr.flush()
    os.execvp(starter[0], [*starter, *words])  # noqa: S606  (no shell; our words)


def _plan(
    part: NodeLaunch, loaded: LoadedConfig, *, rank: int, assignment: RunAssignment | None = None
) -> LaunchPlan:
    run_id, home = run_name(os.environ)
    if assignment:
        run_id = assignment.run_id
        home = home if has_fixed_name(os.environ) else home.with_name(run_id)
    plan = single_node.plan_for_this_machine(
        loaded,
        part.hardware,
        part.target,
        allow_unsharded=part.launch_options.allow_unsharded,
        run_id=run_id,
        folder=node_folder(home, rank),
        ranks=assignment.world if assignment else None,
    )
    address = assignment.address if assignment else loaded.config.launch.local_address
    if address:
        variables = join.interface_variables(loaded.config, address, os.environ)
        plan = replace(plan, env={**plan.env, **variables})
    return plan


def _run_unmet(part: NodeLaunch, plan: LaunchPlan, out: Output) -> int:
    """Leave the machines to torch's own rendezvous, as torchrun does.

    Raises:
        UsageError: The machines cannot find each other without a meeting.
    """
    if part.place.rank is None or part.place.host is None:
        what = "which machine this is" if part.place.rank is None else "where machine 0 is"
        msg = f"launch.meeting is false, and nothing says {what}"
        raise UsageError(msg, hint="set main_process_ip, and --machine-rank on each machine")
    if not single_node.pass_checks(plan, part.hardware, part.launch_options, out):
        return EXIT_MACHINE
    return single_node.run_and_report(plan, part.loaded, as_json=part.launch_options.as_json, out=out)


def _meet(part: NodeLaunch, plan: LaunchPlan, *, is_first: bool, out: Output) -> RunControl:
    config = part.loaded.config
    obstacles = _obstacles(part, plan, is_first=is_first)
    if obstacles:  # try to tell the others, but not for long
        launch = replace(config.launch, rendezvous_timeout_seconds=HOPELESS_SECONDS)
        config = replace(config, launch=launch)
    mine = join.NodeSpec(
        config=config,
        place=part.place,
        target=part.target,
        workers=plan.workers,
        obstacles=[f"{obstacle.message}\n{obstacle.hint}" for obstacle in obstacles],
        run_id=plan.run_id,
        fixed_run_id=has_fixed_name(os.environ),
    )
    if is_first:
        _invite(part, mine, out)
    try:
        return join.join_run(mine, _counter(out), out.note)
    except MachineError:
        if obstacles:
            raise obstacles[0] from None
        raise


def _obstacles(part: NodeLaunch, plan: LaunchPlan, *, is_first: bool) -> list[MachineError]:
    """What keeps this machine from starting.

    Raises:
        MachineError: Nobody could be told of it: this is machine 0, and not where it was said to be.
    """
    fatal = [finding for finding in find_obstacles(plan, part.hardware.gpus) if finding.fatal]
    found = [MachineError(finding.message, hint=finding.hint) for finding in fatal]
    try:
        join.check_interface(part.loaded.config)
    except MachineError as error:
        if is_first:
            raise
        found.insert(0, error)
    return found


def _invite(part: NodeLaunch, mine: join.NodeSpec, out: Output) -> None:
    """Say what to run on the other machines, unless a scheduler or a driver starts them."""
    place = part.place
    if place.source != "the configuration" or GROUP_RUN in os.environ:
        return
    config, address = part.loaded.config, join.own_address(mine)
    said = config.main_process_ip or config.launch.rendezvous_endpoint
    where = [] if said else [f"main_process_ip={address}"]
    if not said and config.main_process_port is None and place.port:
        where.append(f"main_process_port={place.port}")
    order = LaunchCommand(
        target=part.target,
        config=str(part.loaded.path) if part.loaded.path else None,
        overrides=[*where, *shared_overrides(part.overrides)],
        allow_unsharded=part.launch_options.allow_unsharded,
    )
    count = place.least - 1
    machines = "the other machine" if count == 1 else f"each of the {count} other machines"
    out.say(f"machine 0 waits at {address}:{place.port}; on {machines} run, in the same folder:")
    out.say(f"  {shlex.join(order.words(['fsdplaunch']))}")


def _counter(out: Output) -> JoinProgress:
    live = out.live if sys.stderr is not None and sys.stderr.isatty() and not out.quiet else None
    return JoinProgress(say=out.say, live=live)


def _run(plan: LaunchPlan, loaded: LoadedConfig, link: RunControl, part: NodeLaunch, out: Output) -> int:
    from fsdplaunch.launch.runner import run_plan

    assignment, as_json = link.assignment, part.launch_options.as_json
    for note in assignment.notes:
        out.note(note)
    if assignment.rank == 0:
        for note in single_node.torch_notes():  # the machines agree on the version
            out.note(note)
        single_node.announce(plan, loaded, out)
        out.say(f"  machines {', '.join(assignment.names)}")
    else:
        names = f"machine {assignment.rank} of {len(assignment.names)} in run {assignment.run_id}"
        out.say(f"{names}: {plan.workers} workers here, machine 0 is {assignment.names[0]}")
    output = sys.stderr.fileno() if as_json else None
    result = run_plan(plan, output=output, on_signal=single_node.signal_teller(plan, out), link=link)
    if assignment.rank == 0:
        single_node.report(result, plan, as_json=as_json, out=out)
    else:
        _report_part(result, plan, as_json=as_json, out=out)
    return result.exit_code


def _report_part(result: RunResult, plan: LaunchPlan, *, as_json: bool, out: Output) -> None:
    """Machine 0 tells the whole story; this one says in a line how it ended."""
    from fsdplaunch.launch.report.failure_report import end_line, failure_lines

    if as_json:
        out.json({"run_id": plan.run_id, "run_dir": str(plan.run_dir), **result.to_dict()})
    if result.failure is None:
        out.say(end_line(result, workers=plan.world_size))
    else:
        head, *rest = failure_lines(result, run_dir=single_node.short_path(plan.run_dir))
        place = next((line.strip() for line in rest if line.startswith("  on ")), "")
        out.failure([f"{head} {place}".rstrip() + "; machine 0 has the report"])
