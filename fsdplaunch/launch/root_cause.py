"""Which worker failed first, and where in the user's code: the others' ends usually follow from it. Pure.

A worker is described by the plain data the agent records of it: rank, local_rank, pid, code (-n for signal n),
sent (signals the launcher sent to it), ended_ns, error (message, traceback, time_ns; or None) and tail (last lines
of its error output).
"""

import re
import signal
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Worker = Mapping[str, Any]

_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (timeout|closed)|peer closed|"
    r"remote process exited|ncclRemoteError|ncclSystemError|NCCL (error|communicator was aborted)|"
    r"timed out|timeout|ProcessGroup(Gloo|NCCL)|DistNetworkError|DistBackendError|DistStoreError|gloo/transport",
    re.IGNORECASE,
)
"""What a rank says when another one has gone or did not come to a collective."""
_OWN_FAULT = re.compile(
    r"duplicate GPU detected|no socket interface found|shared memory segment|out of memory|invalid usage|Xid"
    r"|uncorrectable ECC|illegal memory access|device-side assert|launch failure|no kernel image|CUBLAS_STATUS"
    r"|driver (version |on your system )?is (too old|insufficient)|system not yet initialized|fallen off the bus",
    re.IGNORECASE,
)
"""What NCCL, or its watchdog, says where this rank itself is at fault."""
UNEQUAL_COLLECTIVES = "Received data size doesn't match expected size"
"""What gloo says where ranks are in different collectives, before it aborts the process."""
WARNINGS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Signals that announce an end and do not ask for one: a script may save and go on."""
_COLLECTIVE_TYPES = ("RuntimeError:", "DistBackendError:", "DistNetworkError:", "DistStoreError:")
_FRAME_LIMIT = 6
"""Frames of the user's own code to show of a traceback; the innermost ones."""
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$')
_INSTALLED = ("site-packages/", "dist-packages/", "/fsdplaunch/", "<frozen", "/lib/python3")


def shell_status(code: int) -> int:
    """Return the status a shell shows: the code itself, or 128 + n for a death by signal n."""
    return 128 - code if code < 0 else code


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9; `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def has_failed(worker: Worker) -> bool:
    """Return whether a worker ended badly of its own accord, not because the launcher ended it."""
    if worker["error"] is not None:
        return True
    code = worker["code"]
    return code not in (None, 0) and -code not in worker["sent"]


def is_consequence(worker: Worker) -> bool:
    """Return whether a failed worker's last words blame the connection to another one."""
    error, code = worker["error"], worker["code"] or 0
    if error is not None:
        message = error["message"] or ""
        return message.startswith(_COLLECTIVE_TYPES) and _blames_another(message)
    # The watchdog thread of NCCL aborts the process; what it had to say is on the error output.
    said = "\n".join(worker["tail"])
    return code == -signal.SIGABRT and UNEQUAL_COLLECTIVES not in said and _blames_another(said)


def _blames_another(text: str) -> bool:
    return _LOST_PEER.search(text) is not None and _OWN_FAULT.search(text) is None


def first_failure(workers: Sequence[Worker]) -> Worker | None:
    """Return the worker whose failure explains the others': the earliest, of those that blame none if any."""

    def moment(worker: Worker) -> int:  # when its exception was recorded, or else when it was found dead
        return int((worker["error"] or {}).get("time_ns") or worker["ended_ns"] or 0)

    failed = [worker for worker in workers if has_failed(worker)]
    return min(failed, key=lambda worker: (is_consequence(worker), moment(worker)), default=None)


def brief(worker: Worker) -> str:
    """Say in a few words how a worker failed."""
    who, code, error = f"rank {worker['rank']}", worker["code"] or 0, worker["error"]
    if error is not None and error["message"] and not error["message"].startswith("SystemExit"):
        return f"{who} failed: {error['message'].splitlines()[0]}"
    return f"{who} was killed by {signal_name(-code)}" if code < 0 else f"{who} failed with exit code {code}"


def own_signal(worker: Worker) -> str | None:
    """Return the signal that killed a worker, unless it was ours: sent when its failure was recorded already."""
    code = worker["code"] or 0
    return signal_name(-code) if code < 0 and -code not in worker["sent"] else None


def failure_status(worker: Worker) -> int:
    """Return the status the launcher ends with for this cause.

    A worker that had recorded its failure when the launcher ended it, before it could exit, counts as what it was
    about to end with.
    """
    code = worker["code"]
    if code not in (None, 0) and -code not in worker["sent"]:
        return shell_status(code)
    return int((worker["error"] or {}).get("status") or 1)


def user_frames(traceback: str, *, folder: str = "") -> list[str]:
    """Return the traceback's last frames outside installed libraries and this package, `file:line in name   code`.

    Where there are none, the innermost of all. Files inside of `folder` are named by their path from there.
    """
    lines = [*traceback.rstrip().splitlines(), ""]
    found = [(match, code) for line, code in pairwise(lines) if (match := _FRAME.match(line))]
    own = [pair for pair in found if not is_installed(pair[0]["file"])] or found[-1:]
    shown = []
    for match, code in own[-_FRAME_LIMIT:]:
        file = match["file"].removeprefix(folder.rstrip("/") + "/") if folder else match["file"]
        text = f"   {code.strip()}" if code.startswith("    ") else ""
        shown.append(f"{file}:{match['line']} in {match['name']}{text}")
    return shown


def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed library, to Python or to this package."""
    return any(part in file for part in _INSTALLED)
