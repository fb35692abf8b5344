"""One node's workers: start them together, watch them, signal them, record how each one ended. In the agent.

Free of torch: `fsdplaunch.agent.elastic_agent` makes torch's elastic agent use it.
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdplaunch.agent.fork_client import EndedWorker, ForkServer
from fsdplaunch.agent.fork_server import kill_group, kill_worker
from fsdplaunch.agent.output import OutputRelay, open_log
from fsdplaunch.agent.watchdog import Watchdog
from fsdplaunch.agent.worker_spec import WorkerSpec, is_shown
from fsdplaunch.errors import EXIT_SAVED
from fsdplaunch.launch.root_cause import WARNINGS, brief, first_failure, is_installed, signal_name
from fsdplaunch.run_dir import MARKED, error_file, rank_folder, rank_log, read_tail
from fsdplaunch.run_secret import worker_store
from fsdplaunch.step_record import STEPS, read_steps

if TYPE_CHECKING:
    from fsdplaunch.agent.metrics import MetricsExport

_ECHO_SECONDS = {signal.SIGINT: 0.3}
_ECHO_DEFAULT = 1.0
_CRASH = "Fatal Python error"  # as faulthandler begins
_FRAMES = 3
"""How many lines of the script are kept, the innermost first."""
_DRAIN_SECONDS = 1.0
"""How long to wait for more output of a worker that has ended; its own children may hold its pipes for ever."""
KILL_SECONDS = 10.0
"""How long a killed worker may take to die; one that hangs in a driver does not die at all."""
POLL_SECONDS = 0.01
_STREAMS = ("stdout", "stderr")


@dataclass(slots=True)
class StopRequest:
    """State of a request to stop."""

    grace: float  # seconds the workers get to end by themselves
    number: int | None = None  # the signal that was received, or None
    since: float = 0.0  # when, on the monotonic clock
    insisted: bool = False  # a second signal came: kill

    def request(self, number: int) -> bool:
        """Take note of a signal; return whether it is to be passed on to the workers.

        Schedulers signal every process of a job, so one request may arrive twice, directly and through the
        launcher: a repetition at once is an echo. A later one means impatience, unless the first was a warning.
        """
        now = time.monotonic()
        if self.number == number and now - self.since < _ECHO_SECONDS.get(signal.Signals(number), _ECHO_DEFAULT):
            return False
        if self.number is not None and self.number not in WARNINGS:
            self.insisted = True
            return False
        self.number, self.since = number, now
        return True

    @property
    def is_warning(self) -> bool:
        """Return whether the request only announces an end."""
        return self.number in WARNINGS

    @property
    def is_over(self) -> bool:
        """Return whether the grace has been used up."""
        return self.number is not None and time.monotonic() - self.since > self.grace


def stop_status(number: int, codes: list[int | None]) -> int | None:
    """Return the launcher's status after a request to stop, or None when a worker ended in a way of its own.

    `codes` are how workers ended (-n for signal n); None for one that had not been started or was killed by us.
    """
    if number == signal.SIGINT:
        return 128 + number
    if codes and all(code == 0 for code in codes):
        return EXIT_SAVED
    if not codes or any(code is None or -code == number for code in codes):
        return 128 + number
    return None


def last_words(lines: list[str], most: int = 20) -> list[str]:
    """Return the last lines of an error output, and of a crash those that describe it: stacks fill the end."""
    crash = next((number for number, line in enumerate(lines) if line.startswith(_CRASH)), None)
    if crash is None:
        return lines[-most:]
    frames = [line for line in lines[crash:] if line.lstrip().startswith("File ")]
    own = [line for line in frames if not is_installed(line)]
    said = [line for line in lines[:crash] if line.strip()]
    return [*said[-2:], lines[crash], *own[:_FRAMES]][-most:]


@dataclass(slots=True, kw_only=True)
class Worker:
    """One started worker."""

    rank: int
    local_rank: int
    pid: int
    started_ns: int
    began: int = field(default_factory=time.monotonic_ns)  # the same, by a clock that nobody sets
    ran_ns: int | None = None  # how long it has run, by that clock; None while it runs
    sent: list[int] = field(default_factory=list)  # signals that were sent to it
    ended: EndedWorker | None = None  # how it ended, or None while it runs

    def send(self, number: int) -> None:
        """Signal it, if it still runs; SIGKILL also reaches what it started."""
        if self.ended is not None:
            return
        self.sent.append(number)
        if number == signal.SIGKILL:
            kill_worker(self.pid)
        else:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def describe(self, run_dir: Path, attempt: int) -> dict[str, Any]:
        """Return what became of it in an attempt (from 0), as plain data."""
        ended = self.ended
        error = _read_error(error_file(run_dir, self.rank, attempt))
        record = read_steps(rank_folder(run_dir, self.rank), only_head=True)
        tail = []
        if ended is not None and ended.code != 0 and error is None:
            tail = last_words(read_tail(rank_log(run_dir, self.rank, "stderr", attempt), lines=400))
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "pid": self.pid,
            "code": ended.code if ended else None,
            "signal": signal_name(-ended.code) if ended and ended.code < 0 else None,
            "sent": self.sent,
            "started_ns": self.started_ns,
            "ended_ns": ended.time_ns if ended else None,
            "ran_ns": self.ran_ns,
            "peak_bytes": ended.peak_bytes if ended else None,
            "steps": record.made if record is not None and record.pid == self.pid else None,
            "error": error,
            "tail": tail,
        }


def _read_error(path: Path) -> dict[str, Any] | None:
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        extra = message["extraInfo"]
        return {
            "message": str(message["message"]),
            "traceback": str(extra.get("py_callstack") or "") or None,
            "time_ns": int(extra.get("time_ns") or int(extra["timestamp"]) * 10**9),
            "status": int(extra.get("status", 1)),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


class WorkerGroup:
    """The workers of the present attempt, and what became of those before."""

    def __init__(self, spec: WorkerSpec, fork_server: ForkServer, relay: OutputRelay, stop: StopRequest) -> None:
        self.spec = spec
        self.stop = stop
        self.workers: list[Worker] = []
        self.attempts: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.is_replaced = False
        self.is_released = False  # the run is to end, and nothing of it is left here
        self._relay = relay
        self._fork_server = fork_server
        self._attempt = -1
        self._watchdog = Watchdog(spec.run_dir, spec.launch.stall_seconds)
        self.metrics: MetricsExport | None = None
        self._open = False

    def start(self, variables: Mapping[int, Mapping[str, str]]) -> None:
        """Start a worker for each local rank, with these variables beside the agent's own."""
        if self.attempts:
            cause = self.attempts[-1]["cause"]
            failed = sum(attempt["cause"] is not None for attempt in self.attempts)
            again = "the set of nodes has changed: all workers restart"
            if cause is not None:
                again = f"attempt {failed + 1} of {self.spec.launch.max_restarts + 1} ({brief(cause)})"
            self.say(again)
        self._attempt += 1
        self.is_replaced = False
        for worker in self.workers:  # of a rank that does not come again nothing is left to be read
            (rank_folder(self.spec.run_dir, worker.rank) / STEPS).unlink(missing_ok=True)
        self.workers = []
        self._open = True
        if self._attempt == 0:
            self._fork_server.wait_until_ready()
            obstacle = self._fork_server.obstacle
            late = [f"{obstacle}: workers start as fresh interpreters"] if obstacle else []
            for note in (*self._fork_server.notes, *late):
                self.say(note)
        shown = {  # the terminal has to tell them apart where there are several
            local_rank
            for local_rank, own in variables.items()
            for stream in _STREAMS
            if is_shown(self.spec.launch, rank=int(own["RANK"]), local_rank=local_rank, stream=stream)
        }
        for local_rank in sorted(variables):
            worker = self._start_one(local_rank, dict(variables[local_rank]), is_prefixed=len(shown) > 1)
            self.workers.append(worker)
            if self.stop.number is not None and not worker.sent:  # it came while this worker was not yet known
                worker.send(self.stop.number)
        metrics = self.spec.launch.metrics
        if metrics and self.metrics is None and any(worker.rank == 0 for worker in self.workers):
            from fsdplaunch.agent.metrics import MetricsExport

            self.metrics = MetricsExport(self.spec.run_dir, metrics, self.say)
        self._watchdog.watch({worker.rank: worker.pid for worker in self.workers})

    def say(self, note: str) -> None:
        """Print something, now and in the record."""
        self.notes.append(note)
        self._relay.say(note)

    def _start_one(self, local_rank: int, variables: dict[str, str], *, is_prefixed: bool) -> Worker:
        spec, rank = self.spec, int(variables["RANK"])
        errors = error_file(spec.run_dir, rank, self._attempt)
        errors.parent.mkdir(parents=True, exist_ok=True)
        variables |= {"TORCHELASTIC_ERROR_FILE": str(errors), **spec.variables.get(local_rank, {})}
        variables |= worker_store(os.environ, self._attempt, spec.secret)
        files = []
        for stream in _STREAMS:
            file = open_log(rank_log(spec.run_dir, rank, stream, self._attempt))
            if is_shown(spec.launch, rank=rank, local_rank=local_rank, stream=stream):
                if spec.is_reported and stream == "stderr":
                    variables[MARKED] = "1"
                prefix = f"[{rank}] ".encode() if is_prefixed else b""
                file = self._relay.show(file, stream, prefix=prefix)
            files.append(file)
        cold = spec.cold or self._fork_server.obstacle is not None
        command, cpus = spec.cold_command if cold else spec.command, spec.cpus.get(local_rank, ())
        started = time.time_ns()
        try:
            pid = self._fork_server.start_worker(command, variables, cold=cold, files=[0, *files], cpus=cpus)
        finally:
            for file in files:
                os.close(file)
        return Worker(rank=rank, local_rank=local_rank, pid=pid, started_ns=started)

    def look(self, seconds: float = 0.0) -> None:
        """Take note of workers that have ended; wait so many seconds for one."""
        by_pid = {worker.pid: worker for worker in self.workers}
        for ended in self._fork_server.ended(seconds):
            if ended.pid in by_pid:
                worker = by_pid[ended.pid]
                worker.ended, worker.ran_ns = ended, time.monotonic_ns() - worker.began
        if stalled := self._watchdog.look():
            self.say(stalled)

    @property
    def running(self) -> list[Worker]:
        """Return the workers that have not ended, as far as `look` has seen."""
        return [worker for worker in self.workers if worker.ended is None]

    @property
    def failed(self) -> list[Worker]:
        """Return the workers that have ended with anything but 0."""
        return [worker for worker in self.workers if worker.ended is not None and worker.ended.code != 0]

    @property
    def is_done(self) -> bool:
        """Return whether the present attempt has ended well."""
        return bool(self.attempts) and not self._open and self.attempts[-1]["cause"] is None

    def send(self, number: int) -> None:
        """Signal every running worker."""
        for worker in self.workers:
            worker.send(number)

    def finish(self, *, number: int = signal.SIGTERM) -> None:
        """End what still runs, first asking by a signal, then killing; drain the output; record the attempt."""
        if not self._open:
            return
        self._open = False
        self.look()
        unwanted = bool(self.running or self.failed)
        for how, seconds in ((number, self.spec.launch.shutdown_grace_seconds), (signal.SIGKILL, KILL_SECONDS)):
            if self.running:
                self.send(how)
            end = time.monotonic() + seconds
            while self.running and time.monotonic() < end and (how == signal.SIGKILL or not self.stop.insisted):
                time.sleep(POLL_SECONDS)
                self.look()
        if unwanted:  # what failed workers have left behind, such as their data loaders, holds memory and GPUs
            for worker in self.workers:
                kill_group(worker.pid)
        self._relay.drain(_DRAIN_SECONDS, failed=unwanted, until=lambda: self.stop.insisted)
        workers = [worker.describe(self.spec.run_dir, self._attempt) for worker in self.workers]
        self.attempts.append(
            {
                "attempt": self._attempt,
                "started_ns": min((worker.started_ns for worker in self.workers), default=None),
                "ended_ns": time.time_ns(),
                "ran_ns": max((time.monotonic_ns() - worker.began for worker in self.workers), default=None),
                "workers": workers,
                # Workers that make way for others, because nodes have come or gone, have not failed.
                "cause": None if self.is_replaced else first_failure(workers),
            }
        )
