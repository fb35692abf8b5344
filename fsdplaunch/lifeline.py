"""Die with the parent: what keeps a killed launcher from leaving processes behind. Standard library only."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent ends. Does nothing outside Linux.

    Args:
        number: SIGKILL for a worker; SIGTERM for a process that has children to stop first.
    """
    parent = os.getppid()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    except (AttributeError, OSError):
        return
    if os.getppid() != parent:  # the parent ended before the request was made
        os.kill(os.getpid(), number)
