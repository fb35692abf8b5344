"""Die with the parent: what keeps a killed launcher from leaving processes behind. Standard library only."""

import ctypes
import os
import signal
from collections.abc import Callable
from functools import partial

LIFELINE = "FSDPLAUNCH_LIFELINE"
"""Contract variable, not a key: the descriptor of a pipe whose other end only the launcher holds."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals, *, parent: int | None = None) -> None:
    """Ask the kernel to send this process a signal when its parent ends. Does nothing outside Linux.

    Args:
        number: SIGKILL for a worker; SIGTERM for a process that has children to stop first.
        parent: The parent's process id, where it is known; a parent that ended before this call is then noticed.
    """
    parent = os.getppid() if parent is None else parent
    if _request(int(number)) and os.getppid() != parent:  # the parent ended before the request was made
        os.kill(os.getpid(), number)


def ended_with_us() -> Callable[[], None]:
    """Return what a program started from here does first (`preexec_fn`), to be killed when this one ends."""
    return partial(die_with_parent, signal.SIGKILL, parent=os.getpid())


def take_lifeline() -> int | None:
    """Return the launcher's pipe, which ends with the launcher however that ends; None where there is none.

    It is taken out of the environment and kept from programs that are started from here.
    """
    text = os.environ.pop(LIFELINE, "")
    try:
        descriptor = int(text)
        os.set_inheritable(descriptor, False)
    except (ValueError, OSError):
        return None
    return descriptor


def live_on() -> None:
    """Take that back: this process notices its parent's end by other means."""
    _request(0)


def _request(number: int) -> bool:
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    except (AttributeError, OSError):
        return False
    return True
