"""Make a process, forked from a warm interpreter, what a fresh agent would be. Runs in the agent-to-be."""

import gc
import importlib
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fsdplaunch.agent.fork_server.child import renew_randomness, renew_streams, set_environ, show_as
from fsdplaunch.agent.warm.import_record import ImportRecord
from fsdplaunch.held_port import HELD
from fsdplaunch.launch.warm.surroundings import SETTINGS, setting, signals_in
from fsdplaunch.parent_death import LIFELINE

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """One agent to be.

    Attributes:
        argv: Its command line, from the interpreter on.
        record: What was imported before, for what is to be given again.
    """

    argv: tuple[str, ...]
    record: ImportRecord = field(repr=False)


def become_agent(message: Mapping[str, Any], files: Sequence[int], record: ImportRecord) -> AgentRequest:
    """Take over everything that a launch has handed over.

    Args:
        message: The request of `launch.warm.client`.
        files: The current folder, standard input, output and error output, the lifeline, and the socket that the
            store is to listen at, where there is one.
        record: What was imported before.

    Raises:
        OSError: Something cannot be taken over; the launch has to be a cold one.
        ValueError: A limit cannot be set.
    """
    given = message["handed_over"]
    (here, *streams), inherited = files[:4], files[4:]
    os.setsid()
    os.fchdir(here)
    for place, descriptor in enumerate(streams):
        os.dup2(descriptor, place, inheritable=True)
    for descriptor in (here, *streams):
        os.close(descriptor)
    os.umask(given["umask"])
    _set_limits(given["limits"])
    for name in SETTINGS:
        _set(name, given["settings"][name])
    set_environ({**message["environ"], **dict(zip((LIFELINE, HELD), map(str, inherited), strict=False))})
    time.tzset()
    argv = tuple(message["argv"])
    renew_streams()
    renew_randomness()
    _renew_seed()
    _renew_folders(record.temporary_folder)
    importlib.invalidate_caches()
    sys.argv, sys.orig_argv = list(argv[2:]), list(argv)
    show_as(argv)
    gc.enable()
    _set_signals(signals_in(given["ignored"]), message["blocked"])
    return AgentRequest(argv=argv, record=record)


def _renew_seed() -> None:
    """Seed torch's generator by chance, as importing torch does: a script that sets no seed begins with it."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.seed()


def _renew_folders(temporary: str | None) -> None:
    """Forget in which folder this was imported, and which one for temporary files was chosen since.

    Args:
        temporary: The one that importing chose, or None.
    """
    tempfile.tempdir = temporary
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:  # what it spawns imports from there
        multiprocessing.ORIGINAL_DIR = os.getcwd()  # noqa: PTH109


def _set_limits(limits: Mapping[str, Sequence[int]]) -> None:
    for number, wanted in limits.items():
        if resource.getrlimit(int(number)) != tuple(wanted):
            resource.setrlimit(int(number), (wanted[0], wanted[1]))


def _set(name: str, text: str) -> None:
    if setting(name) != text:
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(text)


def _set_signals(ignored: Iterable[int], blocked: Iterable[int]) -> None:
    """Treat signals as an interpreter does at its start, which inherits those that are ignored."""
    signal.set_wakeup_fd(-1)
    ignored = {*ignored, *_IGNORED_BY_PYTHON}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        wanted: Any = signal.SIG_IGN if number in ignored else signal.SIG_DFL
        if number == signal.SIGINT and number not in ignored:
            wanted = signal.default_int_handler
        if signal.getsignal(number) is not wanted:
            with suppress(OSError, ValueError):  # the C library keeps two for itself
                signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
