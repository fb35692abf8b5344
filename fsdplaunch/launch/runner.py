"""Run a LaunchPlan: start the agent, pass signals on, wait, read what came of it. Never imports torch."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fsdplaunch import run_dir
from fsdplaunch.config.environment import ALLOW_UNSHARDED, without_run
from fsdplaunch.config.render import render
from fsdplaunch.config.resolve import shards_models
from fsdplaunch.errors import LaunchError
from fsdplaunch.features import WARM_CLIENT, feature
from fsdplaunch.files import open_missing_streams
from fsdplaunch.launch.agent_process import begun_agent, end_begun, start_agent
from fsdplaunch.launch.entry_points import preload_lists
from fsdplaunch.launch.plan import LaunchPlan
from fsdplaunch.launch.root_cause import shell_status, signal_name
from fsdplaunch.launch.runs import age_of, note_revision, start_of, versions, write_job
from fsdplaunch.launch.secret_variables import without_variables
from fsdplaunch.parent_death import LAUNCHER, LIFELINE
from fsdplaunch.private_dir import remove_abandoned_dirs
from fsdplaunch.probe.hardware import memory_kills, usable_memory
from fsdplaunch.run_secret import SECRET
from fsdplaunch.sockets import HELD, inherited_limit

if TYPE_CHECKING:
    from fsdplaunch.launch.coordination.run_control import AgentProcess, RunAssignment, RunControl
    from fsdplaunch.launch.run_result import RunResult

PATIENCE = 2
"""Signals that are passed on before the agent is killed."""
_LOOK_SECONDS = 0.5
_AGENT_SECONDS = 5.0
"""How long the agent may take beyond what it gives its workers."""
_NO_SPACE = 2**20
"""Bytes below which a disk counts as full where the agent could not write its record."""


def _start_agent(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    *,
    output: int | None,
    folder: Path | None,
    held_port: socket.socket | None,
) -> tuple[AgentProcess, int]:
    """Start the plan's agent in a session of its own; return our end of its lifeline, to be held until it ends."""
    # Nothing is ever written: that its other end closes, which no way of dying avoids, says that we have gone.
    lifeline, held = os.pipe()
    # A Ctrl-C waits until the agent can answer it: its interpreter alone would print a traceback.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    modules = preload_lists(plan.config, plan.target.command)
    agent: AgentProcess | None = None
    files = [lifeline, *([held_port.fileno()] if held_port is not None else [])]
    try:
        with suppress(LaunchError), inherited_limit():  # without: this package was built without warm interpreters
            agent = feature(WARM_CLIENT).warm_agent(
                plan.argv,
                environ,
                modules,
                folder or Path.cwd(),
                [0, 1 if output is None else output, 2, *files],
                keep_seconds=plan.config.launch.keep_warm_seconds,
                blocked=[*before, signal.SIGINT],
                # One that wrote no status was killed.
                lost_status=lambda: run_dir.read_json(run_dir.agent_record(plan.run_dir)).get(
                    "exit_code", -signal.SIGKILL
                ),
            )
        if agent is None and output is None and folder is None:
            agent = begun_agent(plan.argv, environ, files)
        if agent is None:
            variables = {**environ, **dict(zip((LIFELINE, HELD), map(str, files), strict=False))}
            agent = start_agent(plan.argv, files=files, env=variables, stdout=output, cwd=folder)
        end_begun()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(lifeline)
        if held_port is not None:
            held_port.close()  # its port is to be free again when the agent has ended
    return agent, held


def run_plan(
    plan: LaunchPlan,
    *,
    output: int | None = None,  # for what the shown ranks write to their standard output; ours when left out
    # Called with each signal that is passed on, and how many there have been.
    on_signal: Callable[[int, int], None] = lambda *_: None,
    control: RunControl | None = None,  # the other nodes, which end together and report one cause
    secret: str = "",  # the run's, where several nodes take part without `control`
    folder: Path | None = None,  # where the workers start; the current one when left out
    # Called while the run goes on; where it says so the run is asked to end, and then killed.
    is_over: Callable[[], bool] | None = None,
) -> RunResult:
    """Start the plan's agent and wait for its end.

    The agent gets a session of its own, so that a Ctrl-C in the terminal reaches it once, through us. A first
    signal is passed on and gives the workers time to save; a second one kills. The run's folder is created here.
    """
    open_missing_streams()
    # On a file system that nodes share, another node's part may have made it.
    plan.run_dir.mkdir(parents=True, exist_ok=plan.nodes > 1, mode=run_dir.FOLDER_MODE)
    run_dir.write_json(plan.run_dir / run_dir.PLAN, plan.to_dict())
    nodes = list(control.assignment.names) if control is not None else []
    write_job(plan.run_dir, route="here", nodes=nodes, versions=versions())
    config_text = render(without_variables(plan.config), full=True, comments=False)
    run_dir.write_text(plan.run_dir / run_dir.CONFIG, config_text)
    if not plan.config.machine_rank or plan.nodes == 1:
        run_dir.link_latest(plan.run_dir)
    if plan.config.launch.timing:
        _begin_timing(plan.run_dir)
    start, kills = time.monotonic(), memory_kills()
    environ = {**without_run(os.environ), **plan.env, LAUNCHER: str(os.getpid())}
    secret, held_port = _use_agreed(control.assignment, plan.run_dir) if control is not None else (secret, None)
    environ |= {SECRET: secret} if secret else {}
    agent, lifeline = _start_agent(plan, environ, output=output, folder=folder, held_port=held_port)
    note_revision(plan.run_dir, Path(plan.script).parent if Path(plan.script).is_file() else folder or Path.cwd())
    names = plan.config.launch.signals
    is_new = _attached(control, agent, plan.run_dir, names)
    with _signals_passed_to(agent, names, on_signal, is_new) as received:
        # Imported now, while the agent imports torch, and not before it was started.
        from fsdplaunch.launch.diagnosis import diagnose_record
        from fsdplaunch.launch.run_result import read_result, read_start
        from fsdplaunch.launch.step_summary import read_ranks, summarize

        code = _wait(agent, is_over, plan.config.launch.shutdown_grace_seconds)
        status, record = _read_record(plan, code, received, kills)
        if control is not None:
            from fsdplaunch.launch.coordination.run_control import conclude_run

            status, record = conclude_run(control, status, record)
    os.close(lifeline)
    if code < 0:  # it could not do so itself
        remove_abandoned_dirs()
    result = read_result(record, exit_code=status, seconds=round(time.monotonic() - start, 3), gpus=plan.gpus)
    if plan.config.launch.timing:
        result = replace(result, start=read_start(plan.run_dir / run_dir.START, plan.workers))
    if result.failure is not None:
        beside = "" if plan.target.is_module else str(Path(plan.target.name).parent)
        found = diagnose_record(record, plan.config, python=plan.argv[0], folder=beside)
        result = replace(result, diagnosis=found)
    summary = summarize(read_ranks(plan.run_dir))
    if any(row.step for row in summary.ranks):
        result = replace(result, summary=summary)
    return _written(plan, result)


def _attached(
    control: RunControl | None, agent: AgentProcess, folder: Path, names: Sequence[str]
) -> Callable[[int], bool]:
    """Have other nodes end with this agent; return what says whether a signal has not come through one of them."""
    if control is None:
        return lambda _number: True
    from fsdplaunch.launch.coordination.run_control import attach

    return attach(control, agent, folder, names).came


def _use_agreed(agreed: RunAssignment, folder: Path) -> tuple[str, socket.socket | None]:
    """Write down which nodes take part; return the run's secret, and the port that is held for its store here."""
    from fsdplaunch.launch.coordination.run_control import note_members

    note_members(folder, change=agreed.change, place=agreed.place, nodes=agreed.nodes)
    return agreed.secret, agreed.held_port


def _begin_timing(folder: Path) -> None:
    """Make the file in which the parts of the start are noted, with the first: from when this process began."""
    now, since = time.time_ns(), start_of(os.getpid())
    begin = now if since is None else now - int(age_of(since) * 1e9)
    run_dir.write_text(folder / run_dir.START, f"0 begin {begin}\n0 plan {now}\n")


def _wait(agent: AgentProcess, is_over: Callable[[], bool] | None, grace: float) -> int:
    """Wait for the agent's end; where the run is over before, ask it to end, and kill it if it does not."""
    while is_over is None or not is_over():
        with suppress(subprocess.TimeoutExpired):
            return agent.wait(_LOOK_SECONDS if is_over else None)
    agent.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        return agent.wait(grace + _AGENT_SECONDS)
    agent.kill()
    return agent.wait()


def _read_record(plan: LaunchPlan, code: int, received: Sequence[int], kills: int) -> tuple[int, dict[str, Any]]:
    """Return this node's status and its agent's record, or what to make of one that could not write it.

    `kills` is what `memory_kills` said before the run.
    """
    status, record = shell_status(code), run_dir.read_json(run_dir.agent_record(plan.run_dir))
    if not record and received:  # it was ended while it was starting
        record = {"stopped_by": signal_name(received[0])}
    elif not record and code < 0:
        name = signal_name(-code)
        record = {
            "error": f"the agent, which watches the workers, was killed by {name}",
            "killed_by": name,
            "memory_limit": usable_memory(),
            "memory_kills": memory_kills() - kills,
        }
    elif not record and code and (free := shutil.disk_usage(plan.run_dir).free) < _NO_SPACE:
        # What the ranks print fails there, and so does what would say how they ended.
        record = {"error": f"{plan.run_dir} has no space left ({free // 1024} KiB)", "is_full": True}
    elif not record and code:
        record = {"error": "\n".join(run_dir.read_tail(plan.run_dir / run_dir.AGENT_LOG, lines=1))}
    if status == 0 and (missing := unsharded_ranks(plan, record)):
        message = f"NeverShardedError: {plan.script} ended without sharding a model"
        error = {"message": message, "traceback": None, "time_ns": 0}
        *before, last = record["attempts"]
        worker = next(worker for worker in last["workers"] if worker["rank"] == missing[0])
        cause = {**worker, "code": 1, "error": error}
        return 1, {**record, "attempts": [*before, {**last, "cause": cause}]}
    return status, record


def unsharded_ranks(plan: LaunchPlan, record: Mapping[str, Any]) -> list[int]:
    """Return the ranks of this node that reported success without ever sharding a model.

    The bootstrap checks this itself when a script ends; the marker catches scripts that leave through os._exit.
    """
    watched = plan.target.is_python and shards_models(plan.config)
    if not watched or ALLOW_UNSHARDED in plan.env or plan.config.launch.shard == "off":
        return []
    ranks = [worker["rank"] for attempt in record.get("attempts", [])[-1:] for worker in attempt["workers"]]
    return [rank for rank in ranks if not (run_dir.rank_folder(plan.run_dir, rank) / run_dir.SHARDED).exists()]


def _written(plan: LaunchPlan, result: RunResult) -> RunResult:
    """Write the result into the run's folder; one that finds no room there is the run's all the same."""
    try:
        run_dir.write_json(plan.run_dir / run_dir.RESULT, result.to_dict())
        if result.failure is not None and result.failure.lost:
            run_dir.write_text(plan.run_dir / run_dir.LOST, "\n".join(result.failure.lost) + "\n")
    except OSError as error:
        return replace(result, unwritten=error.strerror or str(error))
    return result


@contextmanager
def _signals_passed_to(
    agent: AgentProcess,
    names: Sequence[str],
    on_signal: Callable[[int, int], None],
    is_new: Callable[[int], bool],
) -> Iterator[list[int]]:
    """Pass signals on; the agent knows what a second one means. At the third, kill it, and with it its workers.

    Signals that are not new, because they have come through another node, are left out.
    """
    received: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if not is_new(number):
            return
        received.append(number)
        if len(received) > PATIENCE:
            agent.kill()
        else:
            agent.send_signal(number)
        on_signal(number, len(received))

    numbers = [getattr(signal, name) for name in names]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] is not signal.SIG_IGN:  # nohup, for example, has it ignored
            signal.signal(number, handle)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
