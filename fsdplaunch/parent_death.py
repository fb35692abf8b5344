"""Die with the parent: what keeps a killed launcher from leaving processes behind. Standard library only."""

import ctypes
import fcntl
import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial

LAUNCHER = "FSDPLAUNCH_LAUNCHER"
"""Contract variable, not a key: the process id of the launcher that its agent must not outlive."""
LIFELINE = "FSDPLAUNCH_LIFELINE"
"""Contract variable, not a key: the descriptor of a pipe whose other end only the launcher holds."""
ORPHAN_SECONDS = 3.0
"""Grace of workers whose launcher has been killed: nobody is left who could wait."""
_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10
"""Linux's; the module `fcntl` has no name for it."""


def die_with_parent(number: signal.Signals, *, parent: int | None = None) -> None:
    """Ask the kernel to send this process a signal when its parent ends. Does nothing outside Linux.

    Args:
        number: SIGKILL for a worker; SIGTERM for a process that has children to stop first.
        parent: The parent's process id, where it is known; a parent that ended before this call is then noticed.
    """
    parent = os.getppid() if parent is None else parent
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the request was made
            os.kill(os.getpid(), number)


def ended_with_us() -> Callable[[], None]:
    """Return what a program started from here does first (`preexec_fn`), to be killed when this one ends."""
    return partial(die_with_parent, signal.SIGKILL, parent=os.getpid())


def take_lifeline() -> int | None:
    """Return the launcher's pipe, which ends with the launcher however that ends; None where there is none.

    It is taken out of the environment and kept from programs that are started from here.
    """
    with suppress(ValueError, OSError):
        descriptor = int(os.environ.pop(LIFELINE, ""))
        os.set_inheritable(descriptor, False)
        return descriptor
    return None


class Launcher:
    """The launcher of this agent, which ends when that does; its parent, or one that a pipe leads to."""

    def __init__(self, pid: int, lifeline: int | None) -> None:
        """Note who it is.

        Args:
            pid: Its process id.
            lifeline: A pipe whose other end only it holds; None where it is the parent anyway.
        """
        self._pid, self._lifeline = pid, lifeline

    def end_with(self, number: signal.Signals) -> None:
        """Ask the kernel to send this process a signal when the launcher ends, and to wake it if it is stopped."""
        if self._lifeline is not None and number != signal.SIGKILL:
            with suppress(OSError):  # a file of its own: the signal belongs to the file, not to the descriptor
                _signal_at_end(
                    os.open(f"/proc/self/fd/{self._lifeline}", os.O_RDONLY | os.O_NONBLOCK), signal.SIGCONT
                )
        if self._lifeline is None or os.getppid() == self._pid:
            die_with_parent(number, parent=self._pid)
            return
        _signal_at_end(self._lifeline, number)
        if self.is_gone():  # it ended before the request was made
            os.kill(os.getpid(), number)

    def is_gone(self) -> bool:
        """Return whether the launcher has ended."""
        if self._lifeline is None:
            return os.getppid() != self._pid
        return bool(select.select([self._lifeline], [], [], 0)[0])


def _signal_at_end(pipe: int, number: signal.Signals) -> None:
    fcntl.fcntl(pipe, _F_SETSIG, int(number))
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
