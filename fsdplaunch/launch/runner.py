"""Run a LaunchPlan: start the agent, pass signals on, wait, read the result. Never imports torch."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fsdplaunch.launch.plan import LaunchPlan
from fsdplaunch.launch.result import Failure, RunResult, read_result

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_plan(plan: LaunchPlan) -> RunResult:
    """Start the plan's agent and wait for its end.

    The agent gets a session of its own, so that a Ctrl-C in the terminal reaches it once, through us. A first
    signal is passed on and gives the workers time to save; a second one kills.

    Args:
        plan: What to run; its folder is created here.
    """
    _prepare_run_dir(plan)
    start = time.monotonic()
    agent = subprocess.Popen(plan.argv, env={**os.environ, **plan.env}, start_new_session=True)
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
    _write_json(plan.run_dir / "result.json", result.to_dict())
    return result


def _prepare_run_dir(plan: LaunchPlan) -> None:
    plan.run_dir.mkdir(parents=True)
    _write_json(plan.run_dir / "plan.json", plan.to_dict())
    latest = plan.run_dir.parent / "latest"
    fresh = plan.run_dir.parent / f".latest-{os.getpid()}"
    fresh.symlink_to(plan.run_dir.name)
    if latest.is_symlink() or not latest.exists():
        fresh.replace(latest)
    else:  # a user's own file of that name is left alone
        fresh.unlink()


def _write_json(path: Path, value: Any) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def _read(plan: LaunchPlan, status: int) -> RunResult:
    path = plan.run_dir / "result.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
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
    """Pass the first signal on; on a second one kill the agent, and with it (PR_SET_PDEATHSIG) its workers."""
    received = 0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 1:
            agent.kill()
        else:
            agent.send_signal(number)

    before = {number: signal.signal(number, handle) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
