"""Run a LaunchPlan: start the agent, pass signals on, wait, read the result. Never imports torch."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fsdplaunch.config.render import render
from fsdplaunch.launch.plan import LAUNCHER, LaunchPlan
from fsdplaunch.launch.result import Failure, RunResult, read_result
from fsdplaunch.launch.run_folder import CONFIG, PLAN, RESULT, agent_record, read_json, write_json
from fsdplaunch.launch.stop import NAMES
from fsdplaunch.launch.streams import open_missing_streams

PATIENCE = 2
"""Signals that are passed on before the agent is killed."""


def run_plan(plan: LaunchPlan) -> RunResult:
    """Start the plan's agent and wait for its end.

    The agent gets a session of its own, so that a Ctrl-C in the terminal reaches it once, through us. A first
    signal is passed on and gives the workers time to save; a second one kills.

    Args:
        plan: What to run; its folder is created here.
    """
    open_missing_streams()
    _prepare_run_dir(plan)
    start = time.monotonic()
    environ = {**os.environ, **plan.env, LAUNCHER: str(os.getpid())}
    agent = subprocess.Popen(plan.argv, env=environ, start_new_session=True)
    with _signals_passed_to(agent):
        status = agent.wait()
    result = _read(plan, 128 - status if status < 0 else status)
    if not result.seconds:
        result = RunResult(
            exit_code=result.exit_code,
            seconds=round(time.monotonic() - start, 3),
            failure=result.failure,
            stopped_by=result.stopped_by,
        )
    write_json(plan.run_dir / RESULT, result.to_dict())
    return result


def _prepare_run_dir(plan: LaunchPlan) -> None:
    plan.run_dir.mkdir(parents=True)
    write_json(plan.run_dir / PLAN, plan.to_dict())
    (plan.run_dir / CONFIG).write_text(render(plan.config, full=True, comments=False), encoding="utf-8")
    latest = plan.run_dir.parent / "latest"
    fresh = plan.run_dir.parent / f".latest-{os.getpid()}"
    fresh.symlink_to(plan.run_dir.name)
    if latest.is_symlink() or not latest.exists():
        fresh.replace(latest)
    else:  # a user's own file of that name is left alone
        fresh.unlink()


def _read(plan: LaunchPlan, status: int) -> RunResult:
    record = read_json(agent_record(plan.run_dir))
    if status == 0 and (missing := _unsharded_ranks(plan)):
        message = f"NeverShardedError: {plan.script} ended without sharding a model"
        failure = Failure(rank=missing[0], exit_code=1, message=message)
        return RunResult(exit_code=1, seconds=float(record.get("seconds", 0.0)), failure=failure)
    return read_result(record, exit_code=status)


def _unsharded_ranks(plan: LaunchPlan) -> list[int]:
    """Ranks of this node that reported success without ever sharding a model.

    The bootstrap checks this itself when a script ends; the marker catches scripts that leave through os._exit.
    """
    from fsdplaunch.config.environment import ALLOW_UNSHARDED

    if plan.config.distributed_type != "FSDP" or ALLOW_UNSHARDED in plan.env or plan.nodes > 1:
        return []
    return [rank for rank in range(plan.workers) if not (plan.run_dir / "ranks" / str(rank) / "sharded").exists()]


@contextmanager
def _signals_passed_to(agent: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals on; the agent knows what a second one means. At the third, kill it, and with it its workers."""
    interrupts = 0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > PATIENCE:
            agent.kill()
        else:
            agent.send_signal(number)

    numbers = [getattr(signal, name) for name in NAMES]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] is not signal.SIG_IGN:  # nohup, for example, has been told to ignore it
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
