"""One node's workers: start them together, watch them, signal them, record how each one ended. In the agent.

Free of torch: `fsdplaunch.agent.elastic_agent` makes torch's elastic agent use it.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from fsdplaunch.agent.fork_server.client import ForkServer
from fsdplaunch.agent.fork_server.process_group import kill_group
from fsdplaunch.agent.output import OutputRelay, OutputStream, open_log, open_way
from fsdplaunch.agent.output_filter import OutputFilter
from fsdplaunch.agent.stop_request import StopRequest
from fsdplaunch.agent.watchdog import Watchdog
from fsdplaunch.agent.worker import Worker
from fsdplaunch.agent.worker_spec import WorkerSpec
from fsdplaunch.launch.report.root_cause import brief, first_failure
from fsdplaunch.run_dir import error_file, rank_log
from fsdplaunch.run_secret import worker_store
from fsdplaunch.worker_status import MARKED

DRAIN_SECONDS = 1.0
"""How long to wait for more output of a worker that has ended; its own children may hold its pipes for ever."""
KILL_SECONDS = 10.0
"""How long a killed worker may take to die; one that hangs in a driver does not die at all."""
POLL_SECONDS = 0.01


class WorkerGroup:
    """The workers of the present attempt, and what became of those before."""

    def __init__(self, spec: WorkerSpec, fork_server: ForkServer, relay: OutputRelay, stop: StopRequest) -> None:
        self.spec = spec
        self.stop = stop
        self.workers: list[Worker] = []
        self.attempts: list[dict[str, Any]] = []
        self.relay = relay
        self._fork_server = fork_server
        self._attempt = -1
        self._prefixed = False
        self._watchdog = Watchdog(spec.run_dir, spec.launch.stall_seconds)
        self.notes: list[str] = []
        self.is_replaced = False
        self.is_released = False  # the run is to end, and nothing of it is left here
        self._open = False

    def start(self, variables: Mapping[int, Mapping[str, str]]) -> None:
        """Start a worker for each local rank.

        Args:
            variables: What each local rank gets beside the agent's own variables.
        """
        if self.attempts:
            self.say(self._again())
        self._attempt += 1
        self.is_replaced = False
        self.workers = []
        self._open = True
        self._wait_for_fork_server()
        cold = self.spec.cold or self._fork_server.obstacle is not None
        self._prefixed = len(self._shown_ranks(variables)) > 1
        for local_rank in sorted(variables):
            worker = self._start_one(local_rank, dict(variables[local_rank]), cold)
            self.workers.append(worker)
            if self.stop.number is not None and not worker.sent:  # it came while this worker was not yet known
                worker.send(self.stop.number)
        self._watchdog.watch({worker.rank: worker.pid for worker in self.workers})

    def _wait_for_fork_server(self) -> None:
        if self._attempt == 0:
            self._fork_server.wait_until_ready()
            obstacle = self._fork_server.obstacle
            late = [f"{obstacle}: workers start as fresh interpreters"] if obstacle else []
            for note in (*self._fork_server.notes, *late):
                self.say(note)

    def _again(self) -> str:
        """Return why the workers are started anew."""
        cause = self.attempts[-1]["cause"]
        if cause is None:
            return "the nodes that take part have changed: all workers start again"
        failed = sum(attempt["cause"] is not None for attempt in self.attempts)
        return f"attempt {failed + 1} of {self.spec.launch.max_restarts + 1} ({brief(cause)})"

    def say(self, note: str) -> None:
        """Tell the user something, now and in the record."""
        self.notes.append(note)
        self.relay.say(note)

    def _start_one(self, local_rank: int, variables: dict[str, str], cold: bool) -> Worker:
        rank = int(variables["RANK"])
        errors = error_file(self.spec.run_dir, rank, self._attempt)
        errors.parent.mkdir(parents=True, exist_ok=True)
        variables |= {"TORCHELASTIC_ERROR_FILE": str(errors), **self.spec.variables.get(local_rank, {})}
        variables |= worker_store(os.environ, self._attempt, self.spec.secret)
        if self.spec.is_reported and self.spec.is_shown(rank, local_rank, "stderr"):
            variables[MARKED] = "1"
        files = [self._way(rank, local_rank, stream) for stream in ("stdout", "stderr")]
        command = self.spec.cold_command if cold else self.spec.command
        cpus = self.spec.cpus.get(local_rank, ())
        started = time.time_ns()
        try:
            pid = self._fork_server.start_worker(command, variables, cold=cold, files=[0, *files], cpus=cpus)
        finally:
            for file in files:
                os.close(file)
        return Worker(rank=rank, local_rank=local_rank, pid=pid, started_ns=started)

    def _shown_ranks(self, variables: Mapping[int, Mapping[str, str]]) -> set[int]:
        """Return the local ranks that the terminal has to tell apart."""
        return {
            local_rank
            for local_rank, own in variables.items()
            for stream in self.relay.screens
            if self.spec.is_shown(int(own["RANK"]), local_rank, stream)
        }

    def _way(self, rank: int, local_rank: int, stream: str) -> int:
        """Return the descriptor a worker writes one of its streams into."""
        file = open_log(rank_log(self.spec.run_dir, rank, stream, self._attempt))
        if not self.spec.is_shown(rank, local_rank, stream):
            return file
        screen = self.relay.screens[stream]
        ours, theirs, is_terminal = open_way(screen)
        prefix = f"[{rank}] ".encode() if self._prefixed else b""
        output_filter = OutputFilter() if stream == "stderr" else None
        self.relay.add(
            OutputStream(
                end=ours,
                file=file,
                screen=screen,
                prefix=prefix,
                is_terminal=is_terminal,
                output_filter=output_filter,
            )
        )
        return theirs

    def look(self, seconds: float = 0.0) -> None:
        """Take note of workers that have ended.

        Args:
            seconds: How long to wait for one.
        """
        by_pid = {worker.pid: worker for worker in self.workers}
        for ended in self._fork_server.ended(seconds):
            if ended.pid in by_pid:
                by_pid[ended.pid].ended = ended
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
        """End what still runs, first asking, then killing; drain the output; record the attempt.

        Args:
            number: How to ask.
        """
        if not self._open:
            return
        self._open = False
        self.look()
        unwanted = bool(self.running or self.failed)
        if self.running:
            self.send(number)
            self._wait(self.spec.launch.shutdown_grace_seconds, until=lambda: self.stop.insisted)
        if self.running:
            self.send(signal.SIGKILL)
            self._wait(KILL_SECONDS)
        if unwanted:
            self._sweep()
        self.relay.drain(DRAIN_SECONDS, failed=unwanted, until=lambda: self.stop.insisted)
        self.attempts.append(self._record())

    def _wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end and not until():
            time.sleep(POLL_SECONDS)
            self.look()

    def _sweep(self) -> None:
        """Kill what failed workers have left behind, such as their data loaders: they hold memory and GPUs."""
        for worker in self.workers:
            kill_group(worker.pid)

    def _record(self) -> dict[str, Any]:
        workers = [worker.describe(self.spec.run_dir, self._attempt) for worker in self.workers]
        return {
            "attempt": self._attempt,
            "started_ns": min((worker.started_ns for worker in self.workers), default=None),
            "ended_ns": time.time_ns(),
            "workers": workers,
            # Workers that make way for others, because nodes have come or gone, have not failed.
            "cause": None if self.is_replaced else first_failure(workers),
        }
