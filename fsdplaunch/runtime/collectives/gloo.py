"""Gloo's manners: the line it prints for each group, and its threads at the interpreter's end.

Neither imports torch by itself: a script that needs no torch does not pay for it.
"""

import atexit
import ctypes
import os
import re
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from fsdplaunch.files import flush
from fsdplaunch.probe.torch_version import PRINTING_GLOO, installed_numbers
from fsdplaunch.runtime.patch import wrap

_LINE = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. [^\n]*\n")
_swapping = threading.Lock()


def keep_gloo_quiet() -> None:
    """Take the line out of what making a gloo group prints, here and for the script's own groups."""
    if installed_numbers() not in PRINTING_GLOO:
        return
    from torch.distributed import distributed_c10d

    if hasattr(distributed_c10d, "ProcessGroupGloo"):
        wrap(distributed_c10d, "ProcessGroupGloo.__init__", _make_quietly)


def _make_quietly(make: Any, *args: Any, **kwargs: Any) -> None:
    """Take gloo's lines out of all that is written to file descriptor 1 meanwhile."""
    with _swapping:
        _flush()
        kept, file = os.dup(1), os.memfd_create("stdout")
        os.dup2(file, 1)
        try:
            make(*args, **kwargs)
        finally:
            _flush()
            os.dup2(kept, 1)
            rest = _LINE.sub(b"", os.pread(file, os.fstat(file).st_size, 0))
            while rest:
                rest = rest[os.write(1, rest) :]
            os.close(kept)
            os.close(file)


def _flush() -> None:
    """Write out what Python and the C library hold back for descriptor 1."""
    flush(sys.stdout)
    ctypes.CDLL(None).fflush(None)


_LIMIT_SECONDS = 1.0  # how long an end may be put off; a thread may wait for a rank that has gone
_LOOK_SECONDS = 0.001
_THREAD_NAME = "pt_gloo"  # how torch names these threads, in all versions seen: pt_gloo_runloop


@cache
def wait_for_gloo_at_exit() -> None:
    """Have this process's exit handlers end with the wait, once. Call before others register theirs."""
    atexit.register(_wait)


def _wait() -> None:
    """Wait until no thread of gloo is at work, and keep groups that nobody destroyed from being freed after that.

    One that waits for Python's lock looks as still as one that waits for work. But it gets the lock while this
    thread sleeps: one that slept before and after, and was not woken in between, has nothing to do.
    """
    if "torch.distributed" not in sys.modules:  # a script that needs no torch does not import it for this
        return
    end = time.monotonic() + _LIMIT_SECONDS
    seen = _threads()
    while seen and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        before, seen = seen, _threads()
        if seen == before and all(state == "S" for state, _ in seen.values()):
            return


def _threads() -> dict[str, tuple[str, str]]:
    """Return gloo's threads by number: state, and how often each has gone to sleep; none where Linux is not."""
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().startswith(_THREAD_NAME):
                lines = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
                found[task.name] = (lines["State"][0], lines["voluntary_ctxt_switches"])
        except (OSError, KeyError):  # it has ended
            continue
    return found
