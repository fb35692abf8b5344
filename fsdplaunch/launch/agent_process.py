"""Start a node's agent: forked from a warm interpreter where one fits, else as a process of our own."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from fsdplaunch.held_port import HELD
from fsdplaunch.launch.entry_points import WARM_CLIENT, feature
from fsdplaunch.launch.open_files import inherited_limit
from fsdplaunch.launch.plan import LaunchPlan
from fsdplaunch.launch.preloaded import preload_lists
from fsdplaunch.parent_death import LIFELINE, ended_with_us


class AgentProcess(Protocol):
    """A running agent."""

    pid: int

    def send_signal(self, sig: int, /) -> None:
        """Signal it, if it is still there."""

    def kill(self) -> None:
        """Kill it, and with it its workers."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its status; -n for a death by signal n.

        Raises:
            TimeoutExpired: It has not ended within so many seconds.
        """


def start_agent(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    *,
    output: int | None,
    folder: Path | None,
    lost_status: Callable[[], int],
    held_port: socket.socket | None = None,
) -> tuple[AgentProcess, int]:
    """Start the plan's agent, in a session of its own.

    Args:
        plan: What to run.
        environ: All variables of the agent.
        output: Descriptor of its standard output; ours when left out.
        folder: Where it starts; the current one when left out.
        lost_status: Returns its status where the warm interpreter it was forked from has gone before it.
        held_port: Where the run's store is to listen; handed over, and closed here.

    Returns:
        The agent, and our end of its lifeline: to be held until the agent has ended.
    """
    # Nothing is ever written: that its other end closes, which no way of dying avoids, says that we have gone.
    lifeline, held = os.pipe()
    # A Ctrl-C waits until the agent can answer it: its interpreter alone would print a traceback.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    modules = preload_lists(plan.config, plan.target.command)
    agent: AgentProcess | None = None
    files = [lifeline, *([held_port.fileno()] if held_port is not None else [])]
    try:
        with inherited_limit():
            if any(modules) and (warm := feature(WARM_CLIENT)) is not None:
                agent = warm.warm_agent(
                    plan.argv,
                    environ,
                    modules,
                    folder or Path.cwd(),
                    [0, 1 if output is None else output, 2, *files],
                    keep_seconds=plan.config.launch.keep_warm_seconds,
                    blocked=[*before, signal.SIGINT],
                    lost_status=lost_status,
                )
            agent = agent or subprocess.Popen(
                plan.argv,
                env={**environ, **dict(zip((LIFELINE, HELD), map(str, files), strict=False))},
                stdout=output,
                start_new_session=True,
                pass_fds=files,
                cwd=folder,
                preexec_fn=ended_with_us(),  # noqa: PLW1509  (from its first moment, which may be its last)
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(lifeline)
        if held_port is not None:
            held_port.close()  # its port is to be free again when the agent has ended
    return agent, held
