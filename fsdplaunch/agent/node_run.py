"""What the agent does once it has forked the server of its workers: torch's elastic agent, signals, the record."""

import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from fsdplaunch.agent.fork_client import ForkServer
from fsdplaunch.agent.fork_server import kill_descendants
from fsdplaunch.agent.output import OutputRelay, open_log
from fsdplaunch.agent.worker_group import StopRequest, WorkerGroup, stop_status
from fsdplaunch.agent.worker_spec import WorkerSpec, make_worker_spec
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import EXIT_FAILED, EXIT_MACHINE, LaunchError
from fsdplaunch.launch.root_cause import failure_status, signal_name
from fsdplaunch.parent_death import ORPHAN_SECONDS, Launcher
from fsdplaunch.private_dir import remove_private_dir
from fsdplaunch.probe.hardware import memory_kills, usable_memory
from fsdplaunch.run_dir import AGENT_LOG, FOLDER_MODE, RUN_DIR, agent_record, write_json

_log = logging.getLogger("torch.distributed.elastic")


def make_spec(
    config: Config,
    command: Sequence[str],
    *,
    workers: int,
    is_reported: bool,
    secret: str,
    held: socket.socket | None,
) -> WorkerSpec:
    """Return what this node's workers are to be; their run's folder is made where it is not there."""
    run_dir = Path(os.environ[RUN_DIR])
    run_dir.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    spec = make_worker_spec(config, command, run_dir=run_dir, workers=workers, is_reported=is_reported)
    return replace(spec, secret=secret, held=held)


def run_workers(
    fork_server: ForkServer,
    spec: WorkerSpec,
    options: list[str],
    launcher: Launcher,
    *,
    keep_seconds: float,
    is_warm: bool,
) -> int:
    """Run the workers by torch's agent, write what became of them to the run's folder; return the exit status."""
    start, began, kills = time.time_ns(), time.monotonic(), memory_kills()
    # The terminal is kept for the workers' output; what torch has to say, in Python and below, goes to a file.
    relay = OutputRelay({"stdout": os.dup(1), "stderr": os.dup(2)})
    log = open_log(spec.run_dir / AGENT_LOG)
    for place in (1, 2):
        os.dup2(log, place)
    os.close(log)
    worker_group = WorkerGroup(spec, fork_server, relay, StopRequest(spec.launch.shutdown_grace_seconds))
    code, error = _run(worker_group, options, launcher)
    worker_group.finish()
    if worker_group.stop.number is not None or fork_server.is_gone:  # the run was stopped, or killed
        kill_descendants(fork_server.pid)
    if worker_group.metrics is not None:
        worker_group.metrics.close()
    fork_server.close(keep_seconds=0.0 if launcher.is_gone() else keep_seconds)
    remove_private_dir(os.environ)
    number = worker_group.stop.number
    record = {
        "exit_code": code,
        "host": socket.gethostname(),
        "warm": is_warm,
        "memory_limit": usable_memory(),
        "memory_kills": memory_kills() - kills,
        "started_ns": start,
        "seconds": round(time.monotonic() - began, 3),  # not by the clock of the day, which may be set meanwhile
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "attempts": worker_group.attempts,
        "stopped_by": signal_name(number) if number is not None else None,
        "error": error,
        "notes": worker_group.notes,
    }
    try:
        write_json(agent_record(spec.run_dir), record)
    except OSError:  # on a full disk the exit status alone says how it ended
        _log.exception("the agent's record cannot be written")
    return code


def _run(worker_group: WorkerGroup, options: list[str], launcher: Launcher) -> tuple[int, str | None]:
    from fsdplaunch.agent import elastic_agent  # a signal during this import just ends the process

    try:
        _handle_signals(worker_group, launcher)
        elastic_agent.run_elastic(options, worker_group, secret=worker_group.spec.secret)
    except elastic_agent.ChildFailedError:
        return _failure_status(worker_group), None
    except elastic_agent.SignalException:
        return _stop_status(worker_group), None
    except Exception as error:  # torch's agent may fail in any way; the report names it
        _log.exception("the agent failed")
        if worker_group.stop.number is not None:  # the other nodes end as well: that they have gone is not news
            return _stop_status(worker_group), None
        status = EXIT_MACHINE if isinstance(error, elastic_agent.RendezvousError) else EXIT_FAILED
        return status, str(error) if isinstance(error, LaunchError) else f"{type(error).__name__}: {error}"
    return 0, None


def _failure_status(worker_group: WorkerGroup) -> int:
    cause = worker_group.attempts[-1]["cause"] if worker_group.attempts else None
    return failure_status(cause) if cause else EXIT_FAILED


def _stop_status(worker_group: WorkerGroup) -> int:
    worker_group.finish()
    workers = worker_group.attempts[-1]["workers"] if worker_group.attempts else []
    codes = [None if signal.SIGKILL in worker["sent"] else worker["code"] for worker in workers]
    status = stop_status(worker_group.stop.number or signal.SIGTERM, codes)
    return _failure_status(worker_group) if status is None else status


def _handle_signals(worker_group: WorkerGroup, launcher: Launcher) -> None:
    def handle(number: int, _frame: FrameType | None) -> None:
        if worker_group.is_done:
            worker_group.is_released = True
        elif worker_group.stop.request(number):
            if launcher.is_gone():
                worker_group.stop.grace = min(worker_group.stop.grace, ORPHAN_SECONDS)
            worker_group.send(number)
            if not worker_group.running:
                from fsdplaunch.agent.elastic_agent import raise_if_stopped

                raise_if_stopped(worker_group)

    for name in worker_group.spec.launch.signals:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell that starts us in the background
            signal.signal(number, handle)
