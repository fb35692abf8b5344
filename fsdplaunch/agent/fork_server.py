"""The fork server: fork workers on request, report how each one ended, leave none behind.

It is a fork of the agent, made when torch is imported and nothing else has happened: no thread, no socket, no
CUDA. It goes on to import what else the workers need, and then forks them one by one. Where what it imports rules
that out, it becomes a fresh interpreter, `python .../agent/fork_server.py`, which executes them.

A fork copies only the thread that forks. Locks that another thread holds at that moment stay held for ever in the
child, and CUDA refuses to work in a child of a process that has used it. Modules that start threads or open the
GPU when they are imported therefore rule out forking.

multiprocessing's forkserver with its preload is not enough: its children share the server's standard streams,
outlive a killed agent, and report no memory; and nothing says whether what was preloaded may be forked.
"""

import sys

if __name__ == "__main__" and sys.path and sys.path[0].endswith("agent"):
    del sys.path[0]  # this file's folder: its names are not for `import`

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdplaunch.agent.forked_process import become_worker, leave_files, share_modules, show_as
from fsdplaunch.channel import Channel
from fsdplaunch.parent_death import ORPHAN_SECONDS, die_with_parent
from fsdplaunch.private_dir import leave_private_dir, remove_private_dir
from fsdplaunch.run_dir import note_start

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are the agent's to pass on to the workers. A scheduler may send them to every process of a job."""
_GPU_DEVICES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")
"""Of NVIDIA's driver, of Windows' below WSL, and of AMD's."""
_ASK_WITHOUT_CUDA = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch ask the driver's library how many GPUs there are, and not CUDA."""
_PR_SET_CHILD_SUBREAPER = 36
_SWEEPS, _SWEEP_SECONDS = 50, 0.02
_AGENT_SECONDS = 3.0
"""How long the agent may take to end its workers, after their grace, once its launcher has gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preloaded:
    """What came of it."""

    obstacle: str | None = None  # why workers cannot be forked from this process, or None when they can
    notes: tuple[str, ...] = ()  # what the user should read once
    # Variables that importing changed, as it would anywhere: their values before (or None) and after.
    changes: Mapping[str, tuple[str | None, str]] = field(default_factory=dict)


def import_all(names: Iterable[str], *, before: Mapping[str, str]) -> Preloaded:
    """Import modules one after the other; one that fails is named in a note, and left to the script."""
    notes: list[str] = []
    obstacle = None
    # A module that only asks torch.cuda.is_available() would open CUDA, and no fork of this process could use it.
    asks = before.get(_ASK_WITHOUT_CUDA)
    os.environ[_ASK_WITHOUT_CUDA] = "1"
    for name in names:
        try:
            importlib.import_module(name)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # a module may even raise SystemExit; the script will see it
            failed = f"launch.preload: importing {name} failed ({type(error).__name__}: {error})"
            notes.append(f"{failed}; workers go on without it")
        if uses_gpu():
            obstacle = obstacle or f"importing {name} opened the GPU"
        elif has_threads():
            obstacle = obstacle or f"importing {name} started threads"
    del os.environ[_ASK_WITHOUT_CUDA]
    if asks is not None:
        os.environ[_ASK_WITHOUT_CUDA] = asks
    changes = {name: (before.get(name), now) for name, now in os.environ.items() if before.get(name) != now}
    return Preloaded(obstacle=obstacle, notes=tuple(notes), changes=changes)


def uses_gpu() -> bool:
    """Return whether this process has used a GPU: torch says so, or it holds one of a driver's devices open."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return True
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # the descriptor of this very listing
            if str(entry.readlink()).startswith(_GPU_DEVICES):
                return True
    return False


def fork() -> int:
    """Fork, without the warning that Python 3.12 gives where there are threads: here they have been thought of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def has_threads() -> bool:
    """Return whether this process has a second thread that would not survive a fork in good order.

    Libraries with helper threads of their own may end them around a fork (OpenBLAS does, and starts them again
    when it needs them). So a child is made and thrown away first; the threads that are left then are the others.
    """
    folder = Path("/proc/self/task")
    if not folder.is_dir() or len(list(folder.iterdir())) == 1:
        return False
    child = fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(list(folder.iterdir())) > 1


def kill_worker(pid: int) -> None:
    """Kill a worker that nobody has waited for yet, and what it started.

    One that was forked a moment ago leads no group yet, and has started nothing.
    """
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kill what a worker has left behind, which may have been waited for."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def adopt_orphans(*, adopts: bool = True) -> None:
    """Become the parent of what is started below this process and loses its own, as a daemon does; or no more."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def kill_descendants(spared: int = 0) -> None:
    """Kill all that was started below this process but for one that it needs, until nothing of it is left."""
    for _ in range(_SWEEPS):
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(entry.name))
        found = [os.getpid()]
        for pid in found:
            found += children.get(pid, ())
        doomed = {*found[1:]} - {spared}
        if not doomed:
            return
        for pid in doomed:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SWEEP_SECONDS)


class ForkServerProcess:
    """Serves one agent, over one channel, and ends it where it outlives its launcher."""

    def __init__(self, channel: Channel, lifeline: int | None = None) -> None:
        self._channel = channel
        self._lifeline = lifeline
        self._agent = 0
        self._deadline: float | None = None
        self._children: set[int] = set()
        self._is_let_go = False  # by the agent, which has ended what it wanted to end
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, *_PASSED_ON)}

    def serve(
        self, preload: Callable[[], Preloaded], *, parent: int, environ: Mapping[str, str] | None = None
    ) -> list[str] | float:
        """Preload, say so, and fork workers until the agent goes; then kill what is left and end.

        Returns in a worker, whose process is set up, what it is to run; in the fork server itself, when the agent
        lets it go, how many seconds it may stay. `parent` is the agent's process id. `environ` is for the
        fresh interpreter that this process becomes where it cannot be forked from; None for one that is that.
        """
        die_with_parent(signal.SIGKILL, parent=parent)
        adopt_orphans()
        if os.getsid(0) != os.getpid():
            os.setsid()
        show_as(("fsdplaunch", "fork-server"))
        for number in _PASSED_ON:
            signal.signal(number, signal.SIG_IGN)
        self._agent = parent
        loaded = preload()
        if loaded.obstacle is not None and environ is not None:
            self._begin_anew(loaded, environ)
        share_modules()
        # The collector would write to all of it in each worker; to look for garbage first would take 0.2 s.
        gc.freeze()
        die_with_parent(signal.SIGCONT, parent=parent)  # lives on, woken: its end is that of the channel
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        note_start("imports")
        self._tell({"ready": True, "obstacle": loaded.obstacle, "notes": list(loaded.notes)})
        while True:
            received = self._next_message()
            if received is None:
                self._end()
            elif (seconds := received[0].get("released")) is not None:
                self._is_let_go = True
                if not seconds:  # the channel ends next
                    continue
                # Let go of the run's files, so that nobody waits for the end of its output, and of the agent.
                self._kill_workers()
                leave_files()
                self._tell({"released": True})
                self._leave()
                return float(seconds)
            else:
                argv = self._start(*received, loaded)
                if argv is not None:
                    return argv

    def _begin_anew(self, loaded: Preloaded, environ: Mapping[str, str]) -> None:
        """Become a fork server that is a fresh interpreter, in the same process, and only executes."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until the fresh one ignores them
        for number, handler in self._before.items():
            signal.signal(number, handler)
        about: dict[str, Any] = {
            "channel": self._channel.fileno(),
            "lifeline": self._lifeline,
            "parent": self._agent,
        }
        for file in (about["channel"], about["lifeline"]):
            if file is not None:
                os.set_inheritable(file, True)
        about |= {"obstacle": loaded.obstacle, "notes": loaded.notes, "blocked": sorted(before)}
        words = json.dumps(about)
        os.execve(sys.executable, [sys.executable, "-u", __file__, words], environ)  # noqa: S606

    def _next_message(self) -> tuple[dict[str, Any], list[int]] | None:
        while True:
            watched, seconds = [self._channel.fileno(), self._wake[0]], None
            if self._deadline is not None:
                seconds = max(0.0, self._deadline - time.monotonic())
            elif self._lifeline is not None:
                watched.append(self._lifeline)
            readable, _, _ = select.select(watched, [], [], seconds)
            if self._lifeline in readable:  # its only other end has closed
                self._deadline = time.monotonic() + ORPHAN_SECONDS + _AGENT_SECONDS
            if self._deadline is not None and time.monotonic() >= self._deadline:
                if os.getppid() == self._agent:  # it did not end by itself: it may be stopped, or stuck in C
                    os.kill(self._agent, signal.SIGKILL)
                self._end()
            if self._wake[0] in readable:
                with suppress(BlockingIOError):
                    os.read(self._wake[0], 4096)
            self._report_ended()
            if self._channel.fileno() in readable:
                return self._channel.receive()

    def _report_ended(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            now = time.time_ns()
            if pid not in self._children:  # it has lost its parent, a worker
                continue
            self._children.discard(pid)
            with suppress(OSError):  # the agent has gone; the next look at the channel says so
                peak = usage.ru_maxrss * 1024
                self._channel.send({"ended": pid, "status": status, "time_ns": now, "peak_bytes": peak})

    def _start(self, message: dict[str, Any], files: list[int], loaded: Preloaded) -> list[str] | None:
        parent = os.getpid()
        # A signal may be passed on to the worker before it has given up the server's way to treat it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        pid = fork()
        if pid == 0:
            self._leave()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            become_worker(message, changes=loaded.changes, streams=files, parent=parent)
            return list(message["argv"])
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._children.add(pid)
        for file in files:
            os.close(file)
        self._tell({"started": pid})
        return None

    def _tell(self, message: dict[str, Any]) -> None:
        """Send a message to the agent; end where it has gone, perhaps since it asked."""
        try:
            self._channel.send(message)
        except OSError:
            self._end()

    def _leave(self) -> None:
        adopt_orphans(adopts=False)
        leave_private_dir(os.environ)  # its lock is the agent's and ours
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._channel.close()
        for end in (*self._wake, *([self._lifeline] if self._lifeline is not None else [])):
            os.close(end)

    def _end(self) -> None:
        """Kill the workers, and all that they started where the agent has died; end without the exit handlers.

        That is also what workers that have ended left, whoever its parent was.
        """
        self._kill_workers()
        if not self._is_let_go:
            kill_descendants()
        remove_private_dir(os.environ)
        os._exit(0)

    def _kill_workers(self) -> None:
        for pid in self._children:
            kill_worker(pid)


def main(about: Mapping[str, Any]) -> None:
    """Serve as a fresh fork server: what `ForkServerProcess._begin_anew` becomes."""
    channel, lifeline = Channel(socket.socket(fileno=about["channel"])), about["lifeline"]
    for file in (channel.fileno(), lifeline):
        if file is not None:
            os.set_inheritable(file, False)

    def preloaded() -> Preloaded:
        signal.pthread_sigmask(signal.SIG_SETMASK, about["blocked"])
        return Preloaded(obstacle=about["obstacle"], notes=tuple(about["notes"]))

    ForkServerProcess(channel, lifeline).serve(preloaded, parent=about["parent"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
