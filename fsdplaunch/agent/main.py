"""The node's agent: torch's elastic agent, with workers that start warm and an end that can be read.

Runs as a process of its own, `python -u .../agent/main.py TORCHRUN_OPTIONS -m fsdplaunch.runtime.bootstrap ...`.
It imports torch, forks the server its workers will come from, and goes on to run torch's agent. It writes what
became of every worker to the run's folder and exits as the first failing one did.
"""

import sys

if __name__ == "__main__" and sys.path and sys.path[0].endswith("agent"):
    del sys.path[0]  # this file's folder: its names are not for `import`

import importlib
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from fsdplaunch.agent.fork_client import ForkServer
from fsdplaunch.agent.fork_server import adopt_orphans
from fsdplaunch.agent.forked_process import noting_status, register_last, set_environ, skip_shared_destructors
from fsdplaunch.channel import Channel
from fsdplaunch.config.environment import decode
from fsdplaunch.config.resolve import node_range
from fsdplaunch.features import WARM_IMPORTS, WARM_SERVER, feature
from fsdplaunch.files import open_missing_streams
from fsdplaunch.launch.entry_points import AGENT, BOOTSTRAP, PLAN_BY, preload_lists
from fsdplaunch.parent_death import LAUNCHER, LIFELINE, Launcher, take_lifeline
from fsdplaunch.private_dir import make_private_dir
from fsdplaunch.run_dir import note_start
from fsdplaunch.run_secret import SECRET, leave_outer_run
from fsdplaunch.sockets import HELD, take_held

if TYPE_CHECKING:
    from fsdplaunch.warm.import_record import ImportRecord


def main(argv: Sequence[str]) -> None:
    """Be the agent, or, forked from it, a worker; `argv` are torchrun's options, and then the workers' command."""
    register_last()
    _run_agent(argv)


def _run_agent(argv: Sequence[str], imported: "ImportRecord | None" = None) -> None:
    """Be the agent, or what is forked from it; `imported` is what a warm interpreter before it has imported."""
    argv = _await_plan(int(argv[0].removeprefix(PLAN_BY))) if argv[0].startswith(PLAN_BY) else argv
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
    # Imported beside what the fork server imports, and not before it.
    run = importlib.import_module("fsdplaunch.agent.node_run")
    workers = next(int(word.partition("=")[2]) for word in options if word.startswith("--nproc-per-node="))
    spec = run.make_spec(config, command, workers=workers, is_reported=is_reported, secret=secret, held=held)
    is_warm = imported is not None
    code = run.run_workers(fork_server, spec, options, launcher, keep_seconds=keep_seconds, is_warm=is_warm)
    # Nothing that torch started in this process is needed any more, and taking it apart takes time.
    os._exit(code)


def _await_plan(number: int) -> list[str]:
    """Wait, in an interpreter that was begun early, for the agent's variables; return its arguments."""
    channel = Channel(socket.socket(fileno=number))
    received = channel.receive()
    if received is None:  # the launch came to nothing
        os._exit(0)
    channel.close()
    message, files = received
    sys.orig_argv, sys.argv = message["argv"], message["argv"][2:]
    set_environ({**message["environ"], **dict(zip((LIFELINE, HELD), map(str, files), strict=False))})
    return sys.argv[1:]


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split torchrun's options (`--name=value` each) from the workers' command, which begins with another word."""
    count = next((place for place, word in enumerate(argv) if not word.startswith("--")), len(argv))
    return list(argv[:count]), list(argv[count:])


if __name__ == "__main__":
    # Through the imported module: this one is replaced by the script in every worker.
    importlib.import_module("fsdplaunch.agent.main").main(sys.argv[1:])
