"""The node's agent: torch's elastic agent, with workers that start warm and an end that can be read.

Runs as a process of its own, `python -u .../agent/main.py TORCHRUN_OPTIONS -m fsdplaunch.runtime.bootstrap ...`.
It imports torch, forks the server its workers will come from, and goes on to run torch's agent. It writes what
became of every worker to the run's folder and exits as the first failing one did.
"""

import sys

if __name__ == "__main__" and sys.path and sys.path[0].endswith("agent"):
    del sys.path[0]  # this file's folder: its names are not for `import`

import importlib
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from fsdplaunch.agent.fork_client import ForkServer
from fsdplaunch.agent.fork_server import adopt_orphans, kill_descendants
from fsdplaunch.agent.forked_process import noting_status, register_last, skip_shared_destructors
from fsdplaunch.agent.output import OutputRelay, open_log
from fsdplaunch.agent.worker_group import StopRequest, WorkerGroup, stop_status
from fsdplaunch.agent.worker_spec import WorkerSpec, make_worker_spec
from fsdplaunch.config.environment import decode
from fsdplaunch.config.resolve import node_range
from fsdplaunch.errors import EXIT_FAILED, EXIT_MACHINE, LaunchError
from fsdplaunch.features import WARM_IMPORTS, WARM_SERVER, feature
from fsdplaunch.files import open_missing_streams
from fsdplaunch.launch.entry_points import AGENT, BOOTSTRAP, preload_lists
from fsdplaunch.launch.root_cause import failure_status, signal_name
from fsdplaunch.parent_death import LAUNCHER, ORPHAN_SECONDS, Launcher, take_lifeline
from fsdplaunch.private_dir import make_private_dir, remove_private_dir
from fsdplaunch.probe.hardware import memory_kills, usable_memory
from fsdplaunch.run_dir import AGENT_LOG, FOLDER_MODE, RUN_DIR, agent_record, note_start, write_json
from fsdplaunch.run_secret import SECRET, leave_outer_run
from fsdplaunch.sockets import take_held

if TYPE_CHECKING:
    from fsdplaunch.warm.import_record import ImportRecord

_log = logging.getLogger("torch.distributed.elastic")


def main(argv: Sequence[str]) -> None:
    """Be the agent, or, forked from it, a worker; `argv` are torchrun's options, and then the workers' command."""
    register_last()
    _run_agent(argv)


def _run_agent(argv: Sequence[str], imported: "ImportRecord | None" = None) -> None:
    """Be the agent, or what is forked from it; `imported` is what a warm interpreter before it has imported."""
    is_reported = LAUNCHER in os.environ
    pid = int(os.environ.pop(LAUNCHER, os.getppid()))
    secret, lifeline, held = os.environ.pop(SECRET, ""), take_lifeline(), take_held(os.environ)
    launcher = Launcher(pid, lifeline)
    # Until there are workers, and a fork server that ends this process when it is stuck.
    launcher.end_with(signal.SIGKILL)
    open_missing_streams()
    config = decode()
    options, command = split(argv)
    leave_outer_run(os.environ)
    if node_range(config)[1] == 1:
        make_private_dir(os.environ)  # before the fork: the fork server removes it where this process is killed
    keep_seconds = config.launch.keep_warm_seconds if imported is None else 0.0
    record = feature(WARM_IMPORTS).ImportRecord() if keep_seconds else None
    fork_server = ForkServer(
        lifeline,
        noting=record.noting if record is not None else nullcontext,
        imported=imported.give_again if imported is not None else lambda: None,
        unneeded=[held] if held is not None else [],
    )
    # `start` returns once here, with None, and once more in every worker that is forked later, with its request.
    # Everything below runs in the agent only. A worker goes on from this line, with the memory that the agent had
    # at it: torch imported, no thread, no socket, no CUDA.
    modules = preload_lists(config, command)
    note_start("agent")
    forked = fork_server.start(*modules)
    if isinstance(forked, list):  # be the worker that this process was forked to be
        skip_shared_destructors()
        sys.path.insert(0, "")  # the place of the script's folder, which the bootstrap knows
        # By name: to the launcher, what workers run is a program and not a library.
        with noting_status():
            importlib.import_module(BOOTSTRAP).main(forked)
        return
    if forked is not None:  # this is the fork server, and the agent has let it go
        if record is not None:  # the next agent is forked from here, of which some imports are to be done again
            next_argv = feature(WARM_SERVER).stay_warm(record, modules, forked)
            _run_agent(next_argv[next_argv.index(str(AGENT)) + 1 :], record)
        return
    launcher.end_with(signal.SIGTERM)
    adopt_orphans()
    run_dir = Path(os.environ[RUN_DIR])
    run_dir.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    workers = next(int(word.partition("=")[2]) for word in options if word.startswith("--nproc-per-node="))
    spec = make_worker_spec(config, command, run_dir=run_dir, workers=workers, is_reported=is_reported)
    spec = replace(spec, secret=secret, held=held)
    is_warm = imported is not None
    code = _run_workers(fork_server, spec, options, launcher, keep_seconds=keep_seconds, is_warm=is_warm)
    # Nothing that torch started in this process is needed any more, and taking it apart takes time.
    os._exit(code)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split torchrun's options (`--name=value` each) from the workers' command, which begins with another word."""
    count = next((place for place, word in enumerate(argv) if not word.startswith("--")), len(argv))
    return list(argv[:count]), list(argv[count:])


def _run_workers(
    fork_server: ForkServer,
    spec: WorkerSpec,
    options: list[str],
    launcher: Launcher,
    *,
    keep_seconds: float,
    is_warm: bool,
) -> int:
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


if __name__ == "__main__":
    # Through the imported module: this one is replaced by the script in every worker.
    importlib.import_module("fsdplaunch.agent.main").main(sys.argv[1:])
