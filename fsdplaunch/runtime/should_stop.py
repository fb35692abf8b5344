"""`should_stop`: a signal to any rank becomes one answer on all of them, at the same step."""

import signal
import threading
from types import FrameType

import torch
import torch.distributed as dist

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what schedulers send ahead of the end


class _Request:
    """Whether a signal to stop has come to this rank, and whether all ranks know that one has come to any."""

    def __init__(self) -> None:
        self.signalled = False
        self.agreed = False
        self.listening = False
        self._signalled_anywhere = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def note(self, _number: int, _frame: FrameType | None) -> None:
        self.signalled = True

    def decide(self) -> bool:
        """Answer with what the ranks had agreed on, and begin the next agreement."""
        work = self._work or self._begin()
        work.wait()
        self.agreed = bool(self._signalled_anywhere.item())
        self._work = None if self.agreed else self._begin()
        return self.agreed

    def _begin(self) -> dist.Work:
        self._signalled_anywhere.fill_(int(self.signalled))
        # A tensor in host memory: the answer costs no wait for the GPU.
        work: dist.Work = dist.all_reduce(self._signalled_anywhere, op=dist.ReduceOp.MAX, async_op=True)
        return work


_request = _Request()


def should_stop() -> bool:
    """Return whether the run is to save and end; call it once per step, on every rank.

    From its first call on SIGTERM and SIGUSR1 no longer end this process: they make this function return True, on
    all ranks at the same call, whichever of them got the signal. The ranks agree while the step between two calls
    is computed, so a signal takes effect one or two calls after it has come.

    Returns:
        True from the agreed call on. Save then, and end with status 0: `fsdplaunch launch` makes 75 of it.
    """
    if not _request.listening and threading.current_thread() is threading.main_thread():
        _request.listening = True
        for number in _SIGNALS:
            signal.signal(number, _request.note)
    if _request.agreed:
        return True
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return _request.signalled
    return _request.decide()
