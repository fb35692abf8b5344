"""Let gloo's threads finish before the interpreter takes itself apart.

A thread of gloo frees the tensors of a collective after the rank that waited for it has gone on, and takes
Python's lock for that. Where the script has ended meanwhile, that lock is never given again: the thread is ended
inside C++, and with it the process, by SIGABRT ("terminate called without an active exception"). A script whose
last act is a collective meets this in torch 2.13, with torchrun alone too.
"""

import atexit
import sys
import time
from pathlib import Path

_LIMIT_SECONDS = 1.0
"""How long an end may be put off; a thread may wait for a rank that has gone."""
_LOOK_SECONDS = 0.001
_THREAD_NAME = "pt_gloo"
"""How torch names these threads, in all versions seen: pt_gloo_runloop."""
_tasks = Path("/proc/self/task")
_registered: list[bool] = []


def wait_for_gloo_at_exit() -> None:
    """Have this process's exit handlers end with the wait, once. Call before others register theirs."""
    if not _registered:
        _registered.append(True)
        atexit.register(wait_for_gloo)


def wait_for_gloo() -> None:
    """Wait until no thread of gloo is at work, and keep groups that nobody destroyed from being freed after that.

    One that waits for Python's lock looks as still as one that waits for work. But it gets the lock while this
    thread sleeps: one that slept before and after, and was not woken in between, has nothing to do.
    """
    if "torch.distributed" not in sys.modules:  # a script that needs no torch does not import it for this
        return
    from fsdplaunch.runtime.torch_internals.process_groups import keep_groups_from_being_freed

    keep_groups_from_being_freed()
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
    for task in _tasks.glob("*"):
        try:
            if (task / "comm").read_text().startswith(_THREAD_NAME):
                lines = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
                found[task.name] = (lines["State"][0], lines["voluntary_ctxt_switches"])
        except (OSError, KeyError):  # it has ended
            continue
    return found
