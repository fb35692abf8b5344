"""The agent's handle on its fork server, the process that its workers are forked from.

There is always one, also when workers start as fresh interpreters or are not Python at all: then the fork server
executes them. So every worker is watched, signalled and, when the agent is killed, ended in the same way.
"""

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from fsdplaunch.agent.fork_server import ForkServerProcess, Preloaded, fork, has_threads, import_all
from fsdplaunch.channel import open_channel
from fsdplaunch.errors import LaunchError
from fsdplaunch.launch.root_cause import signal_name
from fsdplaunch.run_dir import note_start

CLOSE_SECONDS = 2.0
"""How long the fork server may take to kill its workers and end."""


class _ForkServerGoneError(RuntimeError):
    """The fork server ended, and every worker with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWorker:
    """The end of one worker: its status (-n for signal n), when it was found dead, the most memory it held."""

    pid: int
    code: int
    time_ns: int
    peak_bytes: int


class ForkServer:
    """Starts workers and reports how they ended."""

    def __init__(
        self,
        lifeline: int | None = None,  # the launcher's pipe, which the server watches
        noting: Callable[[], AbstractContextManager[None]] = nullcontext,  # notes what imports do, here and there
        # Does again what imports have done that were made before this process was forked.
        imported: Callable[[], None] = lambda: None,
        unneeded: Sequence[socket.socket] = (),  # that the server and the workers are not to hold open
    ) -> None:
        """Begin with nothing started."""
        self._noting, self._imported = noting, imported
        self._lifeline, self._unneeded = lifeline, unneeded
        self._environ = dict(os.environ)
        self.obstacle: str | None = None
        """Why workers are not forked warm although configured; known once the fork server is ready."""
        self.notes: tuple[str, ...] = ()
        self.pid = 0
        self.is_gone = False
        """Whether it has died, and what it looked after is this process's to end."""
        self._ready = self._released = self._is_reaped = False
        self._ended: list[EndedWorker] = []
        self._started: list[int] = []
        self._running: set[int] = set()

    def start(self, first: Sequence[str], then: Sequence[str]) -> list[str] | float | None:
        """Import modules here, fork the server, and let it import the rest while the caller goes on.

        Returns in several processes: None in this one, once the server is forked; in every worker that the server
        forks later what it is to run; in the server, when `close` lets it go, how many seconds it may stay. This
        process needs the modules in `first` as well, only the workers those in `then`.
        """
        parent = os.getpid()
        interrupt = signal.getsignal(signal.SIGINT)
        if interrupt is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while torch is imported needs no traceback
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher has it wait until here
        gc.disable()  # nothing that importing makes is garbage; looking for some costs a fifth of the time
        self._imported()
        with self._noting():
            for name in first:
                importlib.import_module(name)
        note_start("torch")
        self._channel, there = open_channel()
        self.pid = fork()
        if self.pid == 0:
            self._channel.close()
            for end in self._unneeded:
                end.close()
            signal.signal(signal.SIGINT, interrupt)

            def preload() -> Preloaded:
                with self._noting():
                    return import_all((*first, *then), before=self._environ)

            return ForkServerProcess(there, self._lifeline).serve(preload, parent=parent, environ=self._environ)
        gc.freeze()
        gc.enable()
        there.close()
        if first and has_threads():
            self.obstacle = f"importing {first[-1]} started threads"
        return None

    def wait_until_ready(self) -> None:
        """Wait for the preloading to finish, or to end the server, which is an error."""
        try:
            while not self._ready:
                self._take_message()
        except _ForkServerGoneError:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._is_reaped = True
            how = signal_name(-code) if code < 0 else f"exit code {code}"
            msg = f"importing the modules of launch.preload ended the interpreter ({how})"
            raise LaunchError(msg, hint="remove the module that does so from launch.preload") from None

    def start_worker(
        self, command: Sequence[str], variables: Mapping[str, str], *, cold: bool, files: Sequence[int], cpus: Any
    ) -> int:
        """Start a worker, with variables beside those the agent was started with, and return its process id.

        The bootstrap is to run the command in the fork; `cold`, it is a program with its arguments, and executed.
        `files` are its three standard streams, `cpus` the processors it may use, empty for no change.
        """
        request = {
            "argv": list(command),
            "environ": {**self._environ, **variables},
            "execute": cold,
            "shown_as": [sys.executable, "-u", *command],
            "cpus": list(cpus),
        }
        self._channel.send(request, files)
        while not self._started:
            self._take_message()
        pid = self._started.pop()
        self._running.add(pid)
        return pid

    def ended(self, seconds: float = 0.0) -> list[EndedWorker]:
        """Return the workers that have ended since the last call; wait so many seconds for one."""
        try:
            while select.select([self._channel], [], [], 0.0 if self._ended else seconds)[0]:
                self._take_message()
        except _ForkServerGoneError:  # the kernel has killed its workers by now
            self.is_gone = True
            killed = {"code": -signal.SIGKILL, "time_ns": time.time_ns(), "peak_bytes": 0}
            self._ended += [EndedWorker(pid=pid, **killed) for pid in self._running]
            self._running.clear()
        done, self._ended = self._ended, []
        return done

    def close(self, *, keep_seconds: float = 0.0) -> None:
        """End the fork server and what still runs in it; or let it go for so long, where it can be forked from."""
        if keep_seconds and self._ready and self.obstacle is None:
            self._channel.limit_waiting(CLOSE_SECONDS)
            with suppress(OSError, _ForkServerGoneError):
                self._channel.send({"released": keep_seconds})
                while not self._released:  # it has then left the run's files behind
                    self._take_message()
                self._channel.close()
                return
        with suppress(OSError):
            self._channel.send({"released": 0.0})
        self._channel.close()
        patience = CLOSE_SECONDS if self._ready else 0.0  # it does not look at the channel while it imports
        end = time.monotonic() + patience
        while not self._is_reaped and os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.005)

    def _take_message(self) -> None:
        try:
            received = self._channel.receive()
        except OSError:
            received = None
        if received is None:
            msg = "the process that starts the workers has died"
            raise _ForkServerGoneError(msg)
        message = received[0]
        if "ended" in message:
            pid, known = message["ended"], {name: message[name] for name in ("time_ns", "peak_bytes")}
            self._running.discard(pid)
            self._ended.append(EndedWorker(pid=pid, code=os.waitstatus_to_exitcode(message["status"]), **known))
        elif "released" in message:
            self._released = True
        elif "started" in message:
            self._started.append(message["started"])
        else:
            self._ready = True
            self.obstacle = self.obstacle or message["obstacle"]
            self.notes = tuple(message["notes"])
