"""The warm interpreter: wait for a launch, fork its agent, report how that ended, and leave in time.

It has one thread, no GPU and no code of a script in it. Everything a launch brings, its variables and files among
it, is taken over by the fork alone, which becomes what a fresh agent would be.
"""

import gc
import importlib
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fsdplaunch.agent.fork_server import fork, has_threads, uses_gpu
from fsdplaunch.agent.forked_process import renew_randomness, renew_streams, set_environ, show_as
from fsdplaunch.channel import Channel
from fsdplaunch.files import MEMORY, read_size
from fsdplaunch.parent_death import LIFELINE
from fsdplaunch.sockets import HELD
from fsdplaunch.warm import (
    PROTOCOL,
    SUFFIX,
    UnsafeFolderError,
    folder_path,
    is_at,
    kernel_text,
    listen,
    opened_folder,
    peer_user,
    server_name,
    surroundings,
)
from fsdplaunch.warm.import_record import ImportRecord

LOOK_SECONDS = 2.0
"""How often an idle one looks whether it is still wanted."""
_READ_SECONDS = 1.0
_GO_SECONDS = 5.0
_FILES_SECONDS = 60.0
_SHORT_OF_MEMORY = 0.05  # it ends when less than this part of the machine's memory is available
_FIRST_TO_GO = "800"  # its oom_score_adj: where memory is short at once, the kernel is to end it and no other
_FILES = (5, 6)


def _become_agent(message: Mapping[str, Any], files: Sequence[int], temporary: str | None) -> list[str]:
    """Take over everything that a launch has handed over, and return the agent's command line.

    An error means that something cannot be taken over: the launch has to be a cold one. The files are the current
    folder, standard input, output and error output, the lifeline, and the socket that the store is to listen at,
    where there is one; `temporary` is the folder for temporary files that importing chose.
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
    for number, wanted in given["limits"].items():
        if resource.getrlimit(int(number)) != tuple(wanted):
            resource.setrlimit(int(number), (wanted[0], wanted[1]))
    if kernel_text("oom_score_adj") != given["oom_score_adj"]:
        _write_oom_score(given["oom_score_adj"])
    set_environ({**message["environ"], **dict(zip((LIFELINE, HELD), map(str, inherited), strict=False))})
    time.tzset()
    renew_streams()
    renew_randomness()
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.seed()  # by chance, as importing torch does
    # In which folder this was imported, and which one for temporary files was chosen since, is forgotten.
    tempfile.tempdir = temporary
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:  # what it spawns imports from there
        multiprocessing.ORIGINAL_DIR = os.getcwd()  # noqa: PTH109
    importlib.invalidate_caches()
    argv = list(message["argv"])
    sys.argv, sys.orig_argv = argv[2:], argv
    show_as(argv)
    gc.enable()
    bits = int(given["ignored"], 16)
    _set_signals({number for number in range(1, 65) if bits >> (number - 1) & 1}, message["blocked"])
    return argv


def _write_oom_score(text: str) -> None:
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(text)


def _set_signals(ignored: Iterable[int], blocked: Iterable[int]) -> None:
    """Treat signals as an interpreter does at its start, which inherits those that are ignored."""
    signal.set_wakeup_fd(-1)
    ignored = {*ignored, signal.SIGPIPE, signal.SIGXFSZ}  # these two Python ignores itself
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        wanted: Any = signal.SIG_IGN if number in ignored else signal.SIG_DFL
        if number == signal.SIGINT and number not in ignored:
            wanted = signal.default_int_handler
        if signal.getsignal(number) is not wanted:
            with suppress(OSError, ValueError):  # the C library keeps two for itself
                signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class WarmServer:
    """Serves launches, one agent each, under one name."""

    def __init__(
        self, path: str, name: str, record: ImportRecord, seconds: float, about: Mapping[str, Any]
    ) -> None:
        """Listen in the folder with the sockets; it stays for some seconds after the last run.

        Raises:
            OSError: It cannot listen.
            UnsafeFolderError: The folder is not this user's alone.
        """
        self._path, self._name, self._record, self._seconds, self._about = path, name, record, seconds, about
        self._runs: dict[int, Channel] = {}
        self._own_surroundings = surroundings()
        self._is_closing = False
        self._served = 0
        self._deadline = time.monotonic() + seconds
        self._next_files = time.monotonic() + _FILES_SECONDS
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._identity = (0, 0)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, lambda *_: self.close())
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        with opened_folder(path, make=True) as opened:
            self._listener, self._identity = listen(opened, name)

    def serve(self) -> list[str]:
        """Serve until the time is over, and end; returns in forked agents only."""
        with suppress(OSError):
            _write_oom_score(_FIRST_TO_GO)
        show_as(("fsdplaunch", "warm"))
        gc.freeze()
        while True:
            waited_for = [self._wake[0], *([] if self._is_closing else [self._listener.fileno()])]
            left = LOOK_SECONDS if self._runs else max(0.0, self._deadline - time.monotonic())
            readable, _, _ = select.select(waited_for, [], [], min(LOOK_SECONDS, left))
            if self._wake[0] in readable:
                with suppress(BlockingIOError):
                    os.read(self._wake[0], 4096)
            while self._runs:  # say how agents have ended
                pid, status, _ = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    break
                channel = self._runs.pop(pid, None)
                if channel is None:  # what a worker has left, when this was its fork server
                    continue
                with suppress(OSError):  # its launcher has gone
                    channel.send({"ended": status})
                channel.close()
                self._deadline = time.monotonic() + self._seconds
            if self._listener.fileno() in readable and (argv := self._accept()) is not None:
                return argv
            if not self._runs and (self._is_closing or not self._is_wanted()):
                self.close()
                os._exit(0)

    def _accept(self) -> list[str] | None:
        try:
            end, _ = self._listener.accept()
        except OSError:  # it has left again
            return None
        if peer_user(end) != os.geteuid():
            end.close()
            return None
        end.setblocking(True)
        channel = Channel(end)
        channel.limit_waiting(_READ_SECONDS)
        try:
            received = channel.receive()
            if received is None:
                channel.close()
                return None
            return self._answer(channel, *received)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no request of ours
            channel.close()
            return None

    def _answer(self, channel: Channel, message: Mapping[str, Any], files: list[int]) -> list[str] | None:
        try:
            if message.get("launch") == PROTOCOL and len(files) in _FILES:
                return self._launch(channel, message, files)
            if message.get("stop") is True:
                self.close()
            left = round(max(0.0, self._deadline - time.monotonic()), 1)
            state = {"pid": os.getpid(), "runs": len(self._runs), "served": self._served}
            channel.send({**self._about, **state, "seconds_left": None if self._runs else left})
            channel.close()
            return None
        finally:
            for file in files:
                with suppress(OSError):
                    os.close(file)

    def _launch(self, channel: Channel, message: Mapping[str, Any], files: list[int]) -> list[str] | None:
        own, theirs = self._own_surroundings, message["surroundings"]
        if self._is_closing or not hasattr(os, "pidfd_open"):
            refused: str | None = "it is about to end"
        elif different := [name for name in {**theirs, **own} if theirs.get(name) != own.get(name)]:
            refused = f"{different[0]} differs"
        else:
            refused = self._record.obstacle(message["environ"])
            if refused is None and (refused := self._record.change()):
                self.close()
        if refused is not None:
            channel.send({"refused": refused})
            channel.close()
            return None
        if seconds := float(message["keep_seconds"]):
            self._seconds = seconds
        pid = fork()
        if pid == 0:
            return self._become_agent(channel, message, files)
        self._served += 1
        self._runs[pid] = channel
        return None

    def _become_agent(self, channel: Channel, message: Mapping[str, Any], files: list[int]) -> list[str]:
        """Be the agent, in the child, once the launcher knows of it; until then nothing of it may be seen."""
        try:
            signal.set_wakeup_fd(-1)
            self._listener.close()
            for end in self._wake:
                os.close(end)
            for other in self._runs.values():  # by their own: the number would be closed again when they go
                other.close()
            argv = _become_agent(message, files, self._record.temporary_folder)
            files.clear()
            channel.limit_waiting(_GO_SECONDS)
            process = os.pidfd_open(os.getpid())
            channel.send({"pid": os.getpid()}, [process])
            os.close(process)
            word = channel.receive()
        except BaseException:  # whatever it is: two interpreters in one loop are worse
            os._exit(1)
        if word is None or word[0].get("go") is not True:
            os._exit(0)
        channel.close()
        return argv

    def _is_wanted(self) -> bool:
        """Return whether it has time left, can be found, leaves memory, and nothing imported has changed."""
        now = time.monotonic()
        if now > self._deadline or not is_at(self._path, self._name, self._identity):
            return False
        total, available = (read_size(MEMORY, name) or 0 for name in ("MemTotal", "MemAvailable"))
        if available < _SHORT_OF_MEMORY * total:
            return False
        if now > self._next_files:
            self._next_files = now + _FILES_SECONDS
            return self._record.change() is None
        return True

    def close(self) -> None:
        """Take no more launches; the end comes with that of the last run."""
        if not self._is_closing and is_at(self._path, self._name, self._identity):
            with suppress(OSError):
                os.unlink(f"{self._path}/{self._name}{SUFFIX}")  # noqa: PTH108
        self._is_closing = True


def stay_warm(record: ImportRecord, modules: Sequence[Sequence[str]], seconds: float) -> list[str]:
    """Wait for launches here until `seconds` after the last run; returns in agents forked from it only.

    Launches must have the variables of the record's beginning, and import the same modules before the fork server
    is forked, and in it.
    """
    environ = record.environ_before
    name = server_name(sys.executable, modules, environ, folder=record.folder_before)
    about = {"python": sys.executable, "modules": [*modules[0], *modules[1]]}
    try:
        server = WarmServer(folder_path(environ), name, record, seconds, about)
    except (OSError, UnsafeFolderError):
        os._exit(0)  # there is nobody to tell, and nothing is lost
    with record.noting():  # while the first launch may already wait
        importlib.import_module("fsdplaunch.agent.node_run")
        importlib.import_module("fsdplaunch.agent.elastic_agent")  # beside what its fork server has
    if has_threads() or uses_gpu() or record.change() is not None:
        server.close()
        os._exit(0)
    return server.serve()
