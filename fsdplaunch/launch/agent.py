"""The node's agent: torch's elastic agent, with an end that can be read.

Runs as its own process, `python -m fsdplaunch.launch.agent TORCHRUN_OPTIONS -m fsdplaunch.runtime.bootstrap ...`.
It takes torchrun's options, runs torch.distributed.run in process, and instead of torchrun's report and its
constant exit status 1 it writes `result.json` into the run's folder and exits as the first failing rank did.
"""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from fsdplaunch.config.environment import RUN_DIR
from fsdplaunch.lifeline import die_with_parent


def exit_status(raw: int) -> int:
    """The shell's status for a child's: itself, or 128 + n for a death by signal n (a negative raw status)."""
    return 128 - raw if raw < 0 else raw


def _moment(failure: Any) -> tuple[int, int]:
    """Sort key of a torch ProcessFailure: what happened first.

    A rank killed by a signal leaves no record, and its peers' complaints about the lost connection carry an
    earlier time than the poll that finds it dead: a death by signal therefore goes before recorded exceptions.
    Not so SIGTERM, by which the agent itself ends the other ranks. torch's own time stamps are whole seconds; the
    bootstrap adds nanoseconds to its record.
    """
    extra = failure.message.get("extraInfo", {}) if isinstance(failure.message, dict) else {}
    kind = 1 if failure.exitcode >= 0 else 2 if failure.exitcode == -signal.SIGTERM else 0
    return kind, int(extra.get("time_ns", (failure.timestamp + 1) * 10**9))


def _describe_failure(failures: dict[int, Any]) -> dict[str, Any]:
    """Name the first rank that failed, from torch's ChildFailedError.failures (one ProcessFailure per rank)."""
    rank = min(failures, key=lambda number: _moment(failures[number]))
    first = failures[rank]
    record = first.message if isinstance(first.message, dict) else {}
    return {
        "rank": rank,
        "local_rank": first.local_rank,
        "pid": first.pid,
        "exit_code": exit_status(first.exitcode),
        "signal": first.signal_name() if first.exitcode < 0 else None,
        "message": record.get("message"),
        "traceback": record.get("extraInfo", {}).get("py_callstack"),
        "failed_ranks": sorted(failures),
    }


def _quiet_logging(run_dir: Path) -> None:
    """Send torch's elastic log, which repeats our own report in other words, to a file of the run."""
    handler = logging.FileHandler(run_dir / "agent.log", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False


def _run(argv: list[str], run_dir: Path) -> tuple[int, dict[str, Any] | None]:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    _quiet_logging(run_dir)
    try:
        run(parse_args(argv))
    except ChildFailedError as error:
        failure = _describe_failure(error.failures)
        return failure["exit_code"], failure
    except SignalException as stop:
        number = int(stop.sigval)
        return 128 + number, {"stopped_by": signal.Signals(number).name}
    return 0, None


def main(argv: list[str]) -> int:
    """Run the agent until its workers are done; return the status to exit with."""
    die_with_parent(signal.SIGTERM)
    run_dir = Path(os.environ[RUN_DIR])
    run_dir.mkdir(parents=True, exist_ok=True)
    start = time.time()
    code, failure = _run(argv, run_dir)
    result = {"exit_code": code, "seconds": round(time.time() - start, 3), "failure": failure}
    part = run_dir / "result.json.part"
    part.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    part.replace(run_dir / "result.json")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
