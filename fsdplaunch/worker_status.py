"""What a running worker tells its agent, without a thread and without a system call: how far it has come.

A worker keeps a few numbers in a mapped file of its rank's folder. On a signal it also writes every thread's
Python stack, from C code, so that it answers even while a collective never ends. Standard library only: the worker
writes, the agent reads.
"""

import signal
import struct
from dataclasses import dataclass
from pathlib import Path

HEARTBEAT = "heartbeat"
STACK = "stack.txt"
LAYOUT = struct.Struct("<QQQ")
"""Process id, optimizer steps made, time of the last one in nanoseconds."""
STACK_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None
"""A signal nobody else uses; its default would end a process, so only workers that have a heartbeat get it."""
MARKED = "FSDPLAUNCH_MARKED"
"""Contract variable, not a key: `1` for a worker whose error output passes through the agent to a launcher."""
BEGIN_HIDDEN, END_HIDDEN = b"\0\1fsdplaunch\0", b"\0\2fsdplaunch\0"
"""Around what such a worker writes for its file only, because the launcher will say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """How far a worker has come.

    Attributes:
        pid: Its process id.
        steps: Optimizer steps it has made.
        time_ns: When it made the last one; 0 for none.
    """

    pid: int
    steps: int
    time_ns: int


def read_heartbeat(folder: Path) -> Heartbeat | None:
    """Read a rank's heartbeat; None when it keeps none.

    Args:
        folder: The rank's folder in the run's folder.
    """
    try:
        data = (folder / HEARTBEAT).read_bytes()
    except OSError:
        return None
    if len(data) < LAYOUT.size:
        return None
    pid, steps, time_ns = LAYOUT.unpack_from(data)
    return Heartbeat(pid=pid, steps=steps, time_ns=time_ns)


def is_library_file(file: str) -> bool:
    """Tell whether a file of a stack is Python's, this package's or an installed one's, not the user's."""
    places = ("site-packages/", "dist-packages/", "/fsdplaunch/", "<frozen", "/lib/python3")
    return any(place in file for place in places)
