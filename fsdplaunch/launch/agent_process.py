"""The agent's process. Its interpreter is begun before there is a plan: both import for a tenth of a second.

It is the process that a run starts anyway. It waits for its variables and its command line, and imports before it
has them only what does not look at any. Those that an interpreter reads at its start must be the same by then.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fsdplaunch.channel import Channel, open_channel
from fsdplaunch.launch.entry_points import AGENT, PLAN_BY
from fsdplaunch.parent_death import ended_with_us
from fsdplaunch.sockets import inherited_limit

READ_AT_START = ("LD_", "PYTHON", "COVERAGE_", "SETUPTOOLS_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ")
"""How variables begin that the loader, the interpreter, the C library and the locale read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    process: "subprocess.Popen[bytes]"
    channel: Channel
    environ: Mapping[str, str]


_begun: list[_Begun] = []


@contextmanager
def agent_begun() -> Iterator[None]:
    """Begin the interpreter; it ends with the context unless a run was given to it."""
    channel, there = open_channel()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with suppress(OSError):
        argv = [sys.executable, "-u", str(AGENT), f"{PLAN_BY}{there.fileno()}"]
        begun = start_agent(argv, files=[there.fileno()])
        _begun.append(_Begun(process=begun, channel=channel, environ=dict(os.environ)))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    there.close()
    try:
        yield
    finally:
        channel.close()
        end_begun()


def end_begun() -> None:
    """End an interpreter that was begun and that no run needs."""
    while _begun:
        left = _begun.pop().process
        left.kill()
        left.wait()


def start_agent(argv: Sequence[str], *, files: Sequence[int], **settings: Any) -> "subprocess.Popen[bytes]":
    """Start an agent in a session of its own, killed when this process ends; a Ctrl-C must be blocked here."""
    with inherited_limit():
        return subprocess.Popen(
            argv,
            start_new_session=True,
            pass_fds=files,
            preexec_fn=ended_with_us(),  # noqa: PLW1509  (from its first moment, which may be its last)
            **settings,
        )


def begun_agent(
    argv: Sequence[str], environ: Mapping[str, str], files: Sequence[int]
) -> "subprocess.Popen[bytes] | None":
    """Give a run to the interpreter that was begun; None where there is none, or another would be started.

    Args:
        argv: The agent's command line.
        environ: All its variables.
        files: The launcher's lifeline, and the socket that its store is to listen at, where there is one.
    """
    if not _begun or list(argv[:3]) != [sys.executable, "-u", str(AGENT)]:
        return None
    begun = _begun[-1]
    names = {name for name in {*environ, *begun.environ} if name.startswith(READ_AT_START)}
    if any(environ.get(name) != begun.environ.get(name) for name in names):
        return None
    with suppress(OSError):
        begun.channel.send({"argv": list(argv), "environ": dict(environ)}, files)
        _begun.clear()
        return begun.process
    return None
