"""One started worker: signal it, and tell what became of it. In the agent."""

import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdplaunch.agent.fork_server.client import EndedWorker
from fsdplaunch.agent.fork_server.process_group import kill_worker
from fsdplaunch.agent.last_words import last_words
from fsdplaunch.launch.report.root_cause import signal_name
from fsdplaunch.run_dir import error_file, rank_folder, rank_log, read_tail
from fsdplaunch.worker_status import read_heartbeat


@dataclass(slots=True, kw_only=True)
class Worker:
    """One started worker.

    Attributes:
        sent: Signals that were sent to it.
        ended: How it ended, or None while it runs.
    """

    rank: int
    local_rank: int
    pid: int
    started_ns: int
    sent: list[int] = field(default_factory=list)
    ended: EndedWorker | None = None

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
        """Return what became of it, as plain data.

        Args:
            run_dir: The run's folder, with the worker's files.
            attempt: It belongs to, from 0.
        """
        ended = self.ended
        error = read_error(error_file(run_dir, self.rank, attempt))
        bad = ended is not None and ended.code != 0
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "pid": self.pid,
            "code": ended.code if ended else None,
            "signal": signal_name(-ended.code) if ended and ended.code < 0 else None,
            "sent": self.sent,
            "started_ns": self.started_ns,
            "ended_ns": ended.time_ns if ended else None,
            "peak_bytes": ended.peak_bytes if ended else None,
            "steps": self._steps(run_dir),
            "error": error,
            "tail": self._tail(run_dir, attempt) if bad and error is None else [],
        }

    def _tail(self, run_dir: Path, attempt: int) -> list[str]:
        return last_words(read_tail(rank_log(run_dir, self.rank, "stderr", attempt), lines=400))

    def _steps(self, run_dir: Path) -> int | None:
        beat = read_heartbeat(rank_folder(run_dir, self.rank))
        return beat.steps if beat is not None and beat.pid == self.pid else None


def read_error(path: Path) -> dict[str, Any] | None:
    """Read the exception a worker recorded; None when there is no complete record."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        extra = message["extraInfo"]
        return {
            "message": str(message["message"]),
            "traceback": str(extra.get("py_callstack") or "") or None,
            "time_ns": int(extra.get("time_ns") or int(extra["timestamp"]) * 10**9),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None
