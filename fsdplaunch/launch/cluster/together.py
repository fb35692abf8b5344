"""One machine's part of a run on several: does what the others ask, and takes their word on how it ended."""

import itertools
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdplaunch.launch.cluster.final import merged_record, outcome_of
from fsdplaunch.launch.cluster.group import Actions, Link
from fsdplaunch.launch.run_folder import MACHINES, write_json

INSIST_SECONDS = 1.5
"""After so long a second signal counts as insisting, and kills (launch.stop)."""
KILL_SECONDS = 6.0
"""After so long the agent is killed, and its workers with it: torch may wait a minute for a store that is gone."""


def attach(link: Link, agent: "subprocess.Popen[bytes]", run_dir: Path) -> None:
    """Let the other machines stop this one's agent, or have its workers start again."""
    numbers = itertools.count(1)

    def send(number: int) -> None:
        with suppress(ProcessLookupError):
            agent.send_signal(number)

    def end(at_once: bool) -> None:
        send(signal.SIGTERM)
        if at_once:
            _later(INSIST_SECONDS, lambda: send(signal.SIGTERM))
            _later(KILL_SECONDS, lambda: send(signal.SIGKILL))

    link.actions = Actions(
        stop=send, end=end, change=lambda: write_json(run_dir / MACHINES, {"changes": next(numbers)})
    )
    link.start()


def _later(seconds: float, action: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def settle(link: Link, status: int, record: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Report how this machine's part ended; return the run's status, and the record with the run's cause.

    Args:
        link: The other machines.
        status: Of this machine's agent.
        record: The agent's.
    """
    final = link.settle(outcome_of(record, status))
    link.close()
    return int(final["status"]), merged_record(record, final, whole=link.agreement.rank == 0)
