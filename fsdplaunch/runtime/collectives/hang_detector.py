"""Report that this rank waits for others in a collective, to ranks that wait for this one somewhere else.

A thread looks once a second at where the main thread stands. Only while that is one and the same place in torch's
code for some seconds does it write to the process group's store; a run that makes progress never does.
"""

import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.runtime.collectives.crossed_waits import CrossedWaits
from fsdplaunch.runtime.late_modules import GROUP_IS_ABANDONED, call_if_imported
from fsdplaunch.runtime.torch_internals.process_groups import default_store

PERIOD_SECONDS = 0.5
STILL_SECONDS = 3.0
"""How long the main thread must have stood in one place."""

MOVING = "-"
"""What a rank that waited reports afterwards."""

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[2])
_CLOSED = (RuntimeError, ValueError, AssertionError)
"""What torch raises of a closed store, a destroyed group, or none at all."""
_watching: list[threading.Thread] = []
_left: list[bool] = []
"""Not empty where a wait that was reported has ended with an error, and the script may go on."""


def store() -> Any:
    """Return the key-value store of the process group; it answers while collectives wait."""
    return default_store()


def watch_main_thread() -> None:
    """Start the thread, once."""
    if not _watching and dist.is_initialized() and dist.get_world_size() > 1:
        thread = threading.Thread(target=_watch, name="fsdplaunch-hang-detector", daemon=True)
        _watching.append(thread)
        thread.start()


def place_key(rank: int) -> str:
    """Return the key under which a rank that waits reports where."""
    return f"fsdplaunch/waiting/{rank}"


def _watch() -> None:
    main = threading.main_thread().ident or 0
    seen: tuple[int, int] | None = None
    since, reported = 0.0, False
    crossed = CrossedWaits(store())
    while dist.is_initialized():
        time.sleep(PERIOD_SECONDS)
        frame = sys._current_frames().get(main)
        now = time.monotonic()
        mark = None if frame is None else (id(frame), frame.f_lasti)
        if mark != seen or frame is None:
            seen, since = mark, now
            reported = reported and not report_wait(MOVING)
            _forget_left()
            with suppress(*_CLOSED):
                crossed.go_on()
        elif not reported and now - since > STILL_SECONDS and in_torch(frame):
            reported = report_wait(user_line(frame))
        elif reported:
            with suppress(*_CLOSED):
                crossed.stay(frame, user_line(frame), now - since)
        del frame


def leave_wait() -> None:
    """Note that a wait ends with an error: what was reported holds until the script is seen to go on after it."""
    _left.append(True)


def _forget_left() -> None:
    if _left and not call_if_imported(GROUP_IS_ABANDONED):
        _left.clear()
        report_wait(MOVING)


def report_wait(place: str | None = None) -> bool:
    """Report that this rank waits for others at a place, the running line when left out, or that it goes on.

    Returns:
        Whether it could be reported; a run that is ending may have no store any more.
    """
    try:
        store().set(place_key(dist.get_rank()), place or user_line(sys._getframe(1)))
    except _CLOSED:
        return False
    return True


def report_end() -> None:
    """Report that this rank's script has ended: those that wait for it in a call learn that it will not come."""
    if _watching:
        report_wait("the end of the script")


def in_torch(frame: FrameType) -> bool:
    """Return whether a thread with this innermost frame is in torch's code."""
    return frame.f_code.co_filename.startswith(_TORCH)


def user_line(frame: FrameType) -> str:
    """Return the innermost line that is neither torch's nor ours: `train.py:48 (main)`."""
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith((_TORCH, _OURS)):
        at = at.f_back
    at = at or frame
    return f"{Path(at.f_code.co_filename).name}:{at.f_lineno} ({at.f_code.co_name})"
