"""`should_stop`: a signal to any rank becomes one answer on all of them, at the same step."""

import signal
import threading
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send ahead of the end."""


class _Request:
    """Whether this rank got a signal to stop, and what all ranks know of it.

    Attributes:
        signalled: A signal has come to this rank.
        agreed: All ranks know that one has come to some rank.
    """

    def __init__(self) -> None:
        self.signalled = False
        self.agreed = False
        self._listening = False
        self._signalled_anywhere = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def listen(self) -> None:
        """Take the signals from now on; a worker that never calls this is ended by them."""
        if self._listening or threading.current_thread() is not threading.main_thread():
            return
        self._listening = True
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.signalled = True

    def decide(self) -> bool:
        """Answer with what the ranks had agreed on, and begin the next agreement."""
        if self._work is None:
            self._begin()
        self._end()
        if not self.agreed:
            self._begin()
        return self.agreed

    def _begin(self) -> None:
        self._signalled_anywhere.fill_(int(self.signalled))
        # A tensor in host memory: the answer costs no wait for the GPU.
        self._work = dist.all_reduce(self._signalled_anywhere, op=dist.ReduceOp.MAX, async_op=True)

    def _end(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
        self.agreed = self.agreed or bool(self._signalled_anywhere.item())


_request = _Request()


def should_stop() -> bool:
    """Return whether the run is to save and end; call it once per step, on every rank.

    From its first call on SIGTERM and SIGUSR1 no longer end this process: they make this function return True, on
    all ranks at the same call, whichever of them got the signal. The ranks agree while the step between two calls
    is computed, so a signal takes effect one or two calls after it has come.

    Returns:
        True from the agreed call on. Save then, and end with status 0: `fsdplaunch launch` makes 75 of it.
    """
    _request.listen()
    if _request.agreed:
        return True
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return _request.signalled
    return _request.decide()
