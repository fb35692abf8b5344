"""What an agent has to tell at its end, as a file in the run's folder."""

import logging
import resource
import socket
import time
from typing import Any

from fsdplaunch.agent.worker_group import WorkerGroup
from fsdplaunch.launch.report.root_cause import signal_name
from fsdplaunch.probe.cgroup_limits import memory_kills, usable_memory
from fsdplaunch.run_dir import agent_record, write_json


class AgentRecord:
    """What this agent has to tell, in a file."""

    def __init__(self, worker_group: WorkerGroup, *, is_warm: bool) -> None:
        self._is_warm = is_warm
        self._path = agent_record(worker_group.spec.run_dir)
        self._worker_group = worker_group
        self._start = time.time_ns()
        self._kills = memory_kills()
        self.error: str | None = None

    def write(self, code: int) -> None:
        """Write everything that is known by now; on a full disk the exit status alone says how it ended."""
        try:
            write_json(self._path, self._content(code))
        except OSError:
            logging.getLogger("torch.distributed.elastic").exception("the agent's record cannot be written")

    def _content(self, code: int) -> dict[str, Any]:
        stop = self._worker_group.stop
        return {
            "exit_code": code,
            "host": socket.gethostname(),
            "warm": self._is_warm,
            "memory_limit": usable_memory(),
            "memory_kills": memory_kills() - self._kills,
            "started_ns": self._start,
            "seconds": round((time.time_ns() - self._start) / 1e9, 3),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "attempts": self._worker_group.attempts,
            "stopped_by": signal_name(stop.number) if stop.number is not None else None,
            "error": self.error,
            "notes": self._worker_group.notes,
        }
