"""What the machines of a run agreed on, and what a launcher can do with the others while the run goes on."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from fsdplaunch.launch.coordination.protocol import Message

_PLENTY = 4096
Tell = Callable[[str], None]
"""Shows one line to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAssignment:
    """What holds for the run, the same on every machine but for `rank` and `address`.

    Attributes:
        run_id: The run's name.
        rank: This machine's number.
        names: Every machine's name, by number.
        workers: Workers of every machine, in the same order.
        store: HOST:PORT of torch's store, as this machine reaches it.
        address: This machine, as the others reach it.
        notes: What all machines should be told.
    """

    run_id: str
    rank: int
    names: Sequence[str]
    workers: Sequence[int]
    store: str
    address: str
    notes: Sequence[str] = ()

    @property
    def world(self) -> int:
        """Workers over all machines."""
        return sum(self.workers)


@dataclass(slots=True)
class RunActions:
    """What a launcher does when another machine asks for it; called from the link's thread.

    Attributes:
        stop: Pass a signal on to this machine's workers; gets how many there have been of its number.
        end: End this machine's part, at once when asked so: the run cannot go on.
        change: Machines have gone: start the workers again with those that are left.
    """

    stop: Callable[[int, int], None] = lambda _number, _count: None
    end: Callable[[bool], None] = lambda _at_once: None
    change: Callable[[], None] = lambda: None


class RunControl(Protocol):
    """The other machines, while the run goes on."""

    assignment: RunAssignment
    actions: RunActions

    def start(self) -> None:
        """Begin to listen to the others."""

    def stop(self, number: int, count: int) -> None:
        """Have every machine pass a signal on to its workers."""

    def settle(self, outcome: Mapping[str, Any]) -> Message:
        """Report how this machine's part ended, wait for the others', and return how the run ended."""

    def close(self) -> None:
        """Let the others go."""


@dataclass(slots=True)
class JoinProgress:
    """Says how far the wait has come: live on a terminal, else a line now and then.

    Attributes:
        say: Shows a line that stays.
        live: Shows a line that the next one replaces; None where nothing is live.
        every: Seconds between lines that stay.
    """

    say: Tell
    live: Tell | None = None
    every: float = 10.0
    _start: float = field(default_factory=time.monotonic)
    _last: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the wait began."""
        return time.monotonic() - self._start

    def show(self, text: str) -> None:
        """Show the present state; `text` goes without the time."""
        line = f"{text}, {self.seconds:.0f} s"
        if self.live is not None:
            self.live(line)
        elif time.monotonic() - self._last >= self.every:
            self._last = time.monotonic()
            self.say(line)

    def end(self) -> None:
        """Take the live line away."""
        if self.live is not None:
            self.live("")


class WakeUp:
    """How another thread wakes a loop that waits for the network."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._posted: list[Callable[[], None]] = []

    def post(self, action: Callable[[], None]) -> None:
        """Have the loop do something; safe in a signal handler, which may interrupt a thread in here."""
        self._posted.append(action)  # atomic
        with suppress(OSError):  # it is awake, or gone
            self._writer.send(b"x")

    def collect(self) -> list[Callable[[], None]]:
        """What has been posted since; called by the loop."""
        with suppress(OSError):
            while self.reader.recv(_PLENTY):
                pass
        taken = []
        while self._posted:
            taken.append(self._posted.pop(0))
        return taken
