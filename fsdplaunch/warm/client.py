"""The launcher's side: ask a warm interpreter for an agent.

Whatever is not right with one, the launch is a cold one.
"""

import logging
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdplaunch.channel import Channel
from fsdplaunch.warm import (
    PROTOCOL,
    SUFFIX,
    UnsafeFolderError,
    connect,
    folder_path,
    handed_over,
    opened_folder,
    server_name,
    socket_names,
    surroundings,
)

SECONDS = 3.0
"""How long one answer may take, on a busy machine too; then the launch goes on without it."""
_WORD_SECONDS = 5.0  # how long the interpreter may take to say how an agent ended
_log = logging.getLogger(__name__)


class _WarmAgent:
    """An agent that was forked from a warm interpreter, whose child it is; handled as one of our own."""

    def __init__(self, channel: Channel, pid: int, process: int, lost_status: Callable[[], int]) -> None:
        self.pid = pid
        self._channel = channel  # to the warm interpreter, which will say how the agent ended
        self._process = process  # its pidfd, which no later process can take the place of
        self._lost_status = lost_status  # for when the warm interpreter has gone before it

    def send_signal(self, number: int) -> None:
        """Signal the agent, if it is still there."""
        with suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(self._process, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the agent's end and return its status; -n for a death by signal n."""
        agent, ends = "the agent", [self._channel.fileno(), self._process]
        if not select.select(ends, [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(agent, timeout or 0.0)
        self._channel.limit_waiting(_WORD_SECONDS)
        with suppress(OSError, ValueError):
            answer = self._channel.receive()
            if answer is not None:
                return os.waitstatus_to_exitcode(int(answer[0]["ended"]))
        select.select([self._process], [], [])
        return self._lost_status()


def warm_agent(
    argv: Sequence[str],
    environ: Mapping[str, str],
    modules: Sequence[Sequence[str]],
    folder: Path,
    files: Sequence[int],
    *,
    keep_seconds: float,
    blocked: Sequence[int],
    lost_status: Callable[[], int],
) -> _WarmAgent | None:
    """Have a warm interpreter fork an agent; None where there is none that fits.

    Args:
        argv: The agent's command line.
        environ: All its variables.
        modules: What it imports before its fork server is forked, and in that.
        folder: Where it starts.
        files: Its standard input, output and error output, the launcher's lifeline, and the socket that its store
            is to listen at, where there is one.
        keep_seconds: How long the interpreter is to stay after this run; 0 leaves that as it was set before.
        blocked: Signals that the agent begins with blocked.
        lost_status: See `_WarmAgent`.
    """
    path = folder_path(environ)
    if not os.path.isdir(path):  # noqa: PTH112  (the common case, and a cheap one)
        return None
    channel, agent = None, None
    try:
        name = server_name(argv[0], modules, environ, folder=str(folder))
        with opened_folder(path) as sockets:
            end = connect(sockets, name)
        if end is None:
            return None
        channel = Channel(end)
        channel.limit_waiting(SECONDS)
        request = {
            **{"launch": PROTOCOL, "argv": list(argv), "environ": dict(environ), "keep_seconds": keep_seconds},
            **{"surroundings": surroundings(), "handed_over": handed_over(), "blocked": list(blocked)},
        }
        here = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            channel.send(request, [here, *files])
        finally:
            os.close(here)
        message, descriptors = channel.receive() or ({}, [])
        if "pid" in message and len(descriptors) == 1:
            channel.limit_waiting(0)
            channel.send({"go": True})  # only once it is known here: one that is not known would run twice
            agent = _WarmAgent(channel, int(message["pid"]), descriptors[0], lost_status)
        else:
            _log.debug("a cold launch: %s", message.get("refused", message or "no answer"))
    except (OSError, ValueError, KeyError, TypeError, UnsafeFolderError) as error:
        _log.debug("a cold launch: %s", error)
    finally:
        if channel is not None and agent is None:
            channel.close()
    return agent


def may_be_warm(environ: Mapping[str, str]) -> bool:
    """Return whether some warm interpreter of this user may listen."""
    with suppress(OSError):
        return any(each.suffix == SUFFIX for each in Path(folder_path(environ)).iterdir())
    return False


def folder_problem(environ: Mapping[str, str]) -> str | None:
    """Return why warm interpreters cannot listen in their folder; None where they can."""
    try:
        with suppress(FileNotFoundError), opened_folder(folder_path(environ)):
            pass
    except UnsafeFolderError as error:
        return str(error)
    return None


def ask_all(environ: Mapping[str, str], question: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ask every warm interpreter of this user; return the answers of those that give one."""
    answers = []
    with suppress(FileNotFoundError), opened_folder(folder_path(environ)) as folder:
        for name in socket_names(folder):
            with suppress(OSError, ValueError):
                if (end := connect(folder, name)) is not None:
                    channel = Channel(end)
                    channel.limit_waiting(SECONDS)
                    channel.send(question)
                    answer = channel.receive()
                    channel.close()
                    answers += [answer[0]] if answer is not None else []
    return answers
