"""End a worker with all that it started: its process group, which it leads once it has a session of its own."""

import os
import signal
from contextlib import suppress


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


def exists(pid: int) -> bool:
    """Return whether there is a process with this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
