"""Where the workers' output goes: every rank's to its files, the shown ranks' to the terminal too. In the agent.

A rank that is not shown writes straight into its files, so nothing can hold it up. A shown rank writes into pipes,
or into a terminal of its own where the launcher's output is one; one thread copies what arrives.

Some of its error output is kept from the terminal: the traceback of a failed rank, which the report says in fewer
words, and lines by which torch complains about connections that other ranks have closed because they were done.
"""

import fcntl
import os
import pty
import re
import select
import selectors
import termios
import threading
import time
import tty
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fsdplaunch.display_text import printable
from fsdplaunch.run_dir import BEGIN_HIDDEN, END_HIDDEN, PRIVATE_MODE

_ALARM = re.compile(
    rb"^\[(rank\d+\]:\[)?[WE]\d{4} .*("
    rb"destroy_process_group\(\) was not called|"
    rb"TCPStore\.cpp:\d+\] \[c10d\] (recvValue|recvVector|sendBytes|recvBytes|waitForInput)|"
    rb"Failed to check the .should dump. flag on TCPStore)"
)
_MAY_BEGIN = (b"[W", b"[E", b"[rank")
_GOES_ON = (b"frame #", b"Exception raised from", b"\n")
CHUNK = 1 << 16
LONGEST_LINE = 1 << 16
"""Bytes of an unfinished line that are held back at most, in the hope of its end."""
_HELD_SECONDS = 1.0
"""How long an unfinished line is held back at most."""


class OutputFilter:
    """One stream, taken apart into what the file gets and what the terminal gets."""

    def __init__(self) -> None:
        self._hidden = self._in_alarm = False
        self._marks = self._line = b""
        self._held = bytearray()

    def part(self, data: bytes) -> tuple[bytes, bytes]:
        """Return (for the file, for the terminal) of the next bytes of the stream, in any pieces."""
        kept, shown = self._without_marks(data)
        *lines, rest = (self._line + shown).splitlines(keepends=True) or [b""]
        if rest.endswith(b"\n"):
            lines, rest = [*lines, rest], b""
        shown = b""
        for line in lines:
            self._in_alarm = bool(_ALARM.match(line)) or (self._in_alarm and line.startswith(_GOES_ON))
            if self._in_alarm:
                self._held += line
            else:
                shown += line
        waits = self._in_alarm or any(rest[: len(start)] == start[: len(rest)] for start in _MAY_BEGIN)
        self._line = rest if waits else b""
        return kept, shown if waits else shown + rest

    def end(self, *, failed: bool) -> tuple[bytes, bytes]:
        """Return what is left for each, at the end of the stream; of a failed attempt also what was held back."""
        held = bytes(self._held) if failed else b""
        return self._marks, held + self._line + (b"" if self._hidden else self._marks)

    def _without_marks(self, data: bytes) -> tuple[bytes, bytes]:
        data, self._marks = self._marks + data, b""
        kept, shown = bytearray(), bytearray()
        while data:
            mark = END_HIDDEN if self._hidden else BEGIN_HIDDEN
            text, found, data = data.partition(mark)
            if not found:  # its end may be the beginning of a mark
                sizes = range(min(len(mark) - 1, len(text)), 0, -1)
                size = next((size for size in sizes if mark.startswith(text[-size:])), 0)
                text, self._marks = text[: len(text) - size], text[len(text) - size :]
            kept += text
            shown += b"" if self._hidden else text
            self._hidden ^= bool(found)
        return bytes(kept), bytes(shown)


@dataclass(slots=True, kw_only=True)
class OutputStream:
    """One stream of one shown rank."""

    end: int  # our end of its pipe or terminal
    file: int  # descriptor of its log file
    screen: int  # descriptor it is shown on
    prefix: bytes  # put before each line; empty when only one rank is shown, whose bytes then pass untouched
    is_terminal: bool  # `end` is a terminal's, whose size follows the screen's
    output_filter: OutputFilter | None = None
    partial: bytearray = field(default_factory=bytearray)
    since: float = 0.0


class OutputRelay:
    """Copies shown output in a thread of its own."""

    def __init__(self, screens: Mapping[str, int]) -> None:
        """Take the descriptors that `stdout` and `stderr` are shown on."""
        self.screens = screens
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._sources: list[OutputStream] = []
        self._thread: threading.Thread | None = None
        self._open_line: OutputStream | None = None
        self._arrived = 0
        self._failed = True

    def show(self, file: int, stream: str, *, prefix: bytes) -> int:
        """Return what a rank writes into in place of its log file, which this takes over, so that it is shown.

        Where the screen is a terminal the rank gets one as well: progress bars and colours depend on it.
        """
        screen, is_terminal = self.screens[stream], False
        ours, theirs = os.pipe()
        if os.isatty(screen):
            with suppress(OSError):
                terminal = pty.openpty()
                os.close(ours)
                os.close(theirs)
                (ours, theirs), is_terminal = terminal, True
                tty.setraw(theirs)  # line ends are translated once, by the real terminal
                copy_size(screen, ours)
        source = OutputStream(end=ours, file=file, screen=screen, prefix=prefix, is_terminal=is_terminal)
        source.output_filter = OutputFilter() if stream == "stderr" else None
        os.set_blocking(ours, False)
        with self._lock:
            self._sources.append(source)
            self._selector.register(source.end, selectors.EVENT_READ, source)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="output", daemon=True)
            self._thread.start()
        return theirs

    def say(self, text: str) -> None:
        """Write a line of our own to the error output, not into the middle of a shown line."""
        with self._lock:
            if self._open_line is not None:
                write_all(self._open_line.screen, b"\n")
                self._open_line = None
            write_all(self.screens["stderr"], f"fsdplaunch: {printable(text)}\n".encode())

    def drain(self, seconds: float, *, failed: bool, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until every stream has ended, or until nothing has come for `seconds`; then let go of them.

        A process that outlives its worker may hold a stream open for as long as it likes. A screen whose reader
        has stopped to read, a pager's for example, is waited for, as any program would, or until `until`.
        """
        self._failed = failed
        quiet_until = time.monotonic() + seconds
        arrived = -1
        while self._sources and time.monotonic() < quiet_until:
            if self._arrived != arrived:
                arrived, quiet_until = self._arrived, time.monotonic() + seconds
            time.sleep(0.005)
        while not self._lock.acquire(timeout=0.1):
            if until():
                return
        try:
            for source in list(self._sources):
                self._finish(source)
        finally:
            self._lock.release()

    def _run(self) -> None:
        while True:
            ready = self._selector.select(timeout=_HELD_SECONDS / 2)
            with self._lock:
                for key, _ in ready:
                    if key.data in self._sources:
                        self._copy(key.data)
                now = time.monotonic()
                for source in self._sources:
                    if now - source.since > _HELD_SECONDS:
                        self._show_partial(source)
                    if source.is_terminal:
                        copy_size(source.screen, source.end)

    def _copy(self, source: OutputStream) -> None:
        try:
            data = os.read(source.end, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # a terminal whose other end has been closed
        if not data:
            self._finish(source)
            return
        self._arrived += 1
        kept, shown = source.output_filter.part(data) if source.output_filter is not None else (data, data)
        write_all(source.file, kept)
        self._show(source, shown)

    def _show(self, source: OutputStream, data: bytes) -> None:
        """Show whole lines only where they get a prefix; a carriage return ends one, too: so do progress bars."""
        if not source.prefix:
            if data:
                write_all(source.screen, data)
                self._open_line = None if data.endswith(b"\n") else source
            return
        source.partial += data
        *lines, rest = bytes(source.partial).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        source.partial[:] = rest
        source.since = time.monotonic()
        write_all(source.screen, b"".join(source.prefix + line + b"\n" for line in lines if line))
        if len(rest) >= LONGEST_LINE:
            self._show_partial(source)

    def _show_partial(self, source: OutputStream) -> None:
        if source.partial:
            write_all(source.screen, source.prefix + bytes(source.partial) + b"\n")
            source.partial.clear()

    def _finish(self, source: OutputStream) -> None:
        if source.output_filter is not None:
            kept, shown = source.output_filter.end(failed=self._failed)
            write_all(source.file, kept)
            self._show(source, shown)
        self._show_partial(source)
        self._selector.unregister(source.end)
        self._sources.remove(source)
        os.close(source.end)
        os.close(source.file)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it; a reader that has gone away is not a reason to stop the training."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # somebody who shares the terminal has made it so
            select.select([], [descriptor], [])
        except OSError:
            return


def open_log(path: Path) -> int:
    """Open a rank's log file for appending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_MODE)


def copy_size(screen: int, terminal: int) -> None:
    """Give a terminal the size of the screen; the kernel tells its programs only when that changes it."""
    with suppress(OSError):
        size = fcntl.ioctl(screen, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
