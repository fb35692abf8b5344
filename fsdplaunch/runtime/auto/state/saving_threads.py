"""Threads of the script that save: only while its main thread waits for them.

A thread that gathers while the main thread trains would take part in the training's collectives, and write values
of several steps.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives.hang_detector import in_torch
from fsdplaunch.runtime.script_line import script_line

PATIENCE_SECONDS = 5.0
"""How long the main thread may take to the line where it waits."""
_LOOK_SECONDS = 0.02
_HOMES = ("/threading.py", "/selectors.py", "/concurrent/futures/_base.py", "/concurrent/futures/thread.py")
_WAITING = {"join", "result", "select", "shutdown"}
_QUEUES = ("/queue.py", "/connection.py")


failed: list[CheckpointError] = []
"""What other threads than the main one could not do."""
_turn = threading.RLock()
_gathering: set[threading.Thread] = set()
"""Those of the script's threads that gather, or wait until another one has."""


@contextmanager
def in_turn(call: str) -> Iterator[None]:
    """Let one thread of the script's gather at a time, and each only while the main thread waits for it.

    Args:
        call: The script's, for errors.

    Raises:
        CheckpointError: The main thread goes on.
    """
    thread = threading.current_thread()
    if thread is threading.main_thread() or thread in _gathering:
        yield
        return
    await_main_thread_here(call)
    _gathering.add(thread)
    try:
        with _turn:
            yield
    finally:
        _gathering.discard(thread)


def refuse_several(call: str) -> None:
    """Refuse to gather by all ranks in several threads at once: they may come in another order on each.

    Raises:
        CheckpointError: There are several.
    """
    if threading.current_thread() is not threading.main_thread() and len(_gathering) > 1:
        msg = f"{call} gathers shards on all ranks in several threads at once, whose order may differ by rank"
        raise noted(CheckpointError(msg, hint="save on rank 0 alone, or one after the other in one thread"))


def noted(error: CheckpointError) -> CheckpointError:
    """Return an error of another thread than the main one, which is to end, too."""
    failed.append(error)
    return error


def in_thread_of_torch() -> bool:
    """Return whether this is a thread that Python has not started, such as those of backward passes on a GPU."""
    return threading.current_thread().name.startswith("Dummy-")


def raise_failed() -> None:
    """Raise in the main thread what another one could not do: the script may never look at that one's error.

    Raises:
        CheckpointError: That.
    """
    if failed and threading.current_thread() is threading.main_thread():
        raise failed.pop()


def beside_training() -> bool:
    """Return whether this is another thread than the main one, and that one goes on."""
    return threading.current_thread() is not threading.main_thread() and not _main_waits()


def await_main_thread(call: str) -> None:
    """Wait until the main thread waits, where another one calls this.

    Args:
        call: The script's, for errors.

    Raises:
        CheckpointError: The main thread goes on.
    """
    if threading.current_thread() is threading.main_thread():
        return
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not _main_waits():
        if time.monotonic() > deadline:
            msg = f"{call} gathers shards in another thread, while the main thread goes on"
            hint = (
                "join the thread before the next step; or copy what it writes before it starts, by"
                " {name: value.full_tensor().cpu() for ...} on all ranks, or by value.clone() on rank 0 alone"
            )
            raise noted(CheckpointError(msg, hint=hint))
        time.sleep(_LOOK_SECONDS)


def await_main_thread_here(call: str) -> None:
    """Do so, and tell the script's line with the call; errors as `await_main_thread`."""
    if threading.current_thread() is not threading.main_thread():
        await_main_thread(f"{call} at {script_line()}")


def _main_waits() -> bool:
    """Return whether the main thread stands where threads are waited for, and nowhere in torch."""
    frames = list(_frames(sys._current_frames().get(threading.main_thread().ident or 0)))
    if any(in_torch(frame) or frame.f_code.co_filename.endswith(_QUEUES) for frame in frames):
        return False
    names = {frame.f_code.co_name for frame in frames if frame.f_code.co_filename.endswith(_HOMES)}
    return bool(frames) and frames[0].f_code.co_filename.endswith(_HOMES) and bool(names & _WAITING)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
