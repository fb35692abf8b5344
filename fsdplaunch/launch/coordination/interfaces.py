"""What the nodes of a run agreed on, and what a launcher can do with the others while the run goes on."""

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fsdplaunch.config.schema.endpoints import join_endpoint

PAUSE_SECONDS = 1.5
"""A launcher that has not looked after the others for so long was not able to: the machine was busy, or asleep."""
Tell = Callable[[str], None]
"""Shows one line to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAssignment:
    """What holds for the run, the same on every node but for `rank`, `store` and `address`.

    Attributes:
        run_id: The run's name.
        rank: This node's rank.
        names: Node 0's name; on node 0 every node's, by rank.
        nodes: How many there are.
        world: Workers over all nodes.
        store: HOST:PORT of torch's store, as this node reaches it.
        address: This node, as the others reach it.
        notes: What the user of every node is to be told.
        secret: The run's.
        held_port: On node 0, the socket at which torch's store is to listen: bound before the others hear of it.
    """

    run_id: str
    rank: int
    names: Sequence[str]
    nodes: int
    world: int
    store: str
    address: str
    notes: Sequence[str] = ()
    secret: str = field(default="", repr=False)
    held_port: socket.socket | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_message(
        cls,
        message: Mapping[str, Any],
        *,
        store_host: str,
        address: str,
        secret: str,
        held_port: socket.socket | None = None,
    ) -> "RunAssignment":
        """Read the message that starts a node.

        Args:
            message: As the coordinator sends it.
            store_host: The coordinator, as this node reaches it.
            address: This node, as the others reach it.
            secret: The run's; no message says it.
            held_port: See the class.
        """
        names = ("run_id", "rank", "names", "nodes", "world", "notes")
        store = join_endpoint(store_host, message["store_port"])
        known = {name: message[name] for name in names}
        return cls(**known, store=store, address=address, secret=secret, held_port=held_port)


@dataclass(slots=True)
class RunActions:
    """What a launcher does at another node's request; called from the thread that owns the connections.

    Attributes:
        stop: Pass a signal on to this node's workers; gets how many there have been of its number.
        end: End this node's workers, at once when the argument is true: the run cannot go on.
        change: Nodes have gone: start the workers again with those that are left.
    """

    stop: Callable[[int, int], None] = lambda _number, _count: None
    end: Callable[[bool], None] = lambda _at_once: None
    change: Callable[[], None] = lambda: None


class OwnPause:
    """Notices that this process itself was stopped for a while: what came meanwhile is read before judging."""

    def __init__(self, seconds: float) -> None:
        """Begin to look.

        Args:
            seconds: Looks further apart than this are a pause.
        """
        self._seconds, self._looked, self._is_noted = seconds, time.monotonic(), False

    def has_just_ended(self) -> bool:
        """Return whether there was one before this look; never twice in a row."""
        now = time.monotonic()
        self._is_noted = now - self._looked > self._seconds and not self._is_noted
        self._looked = now
        return self._is_noted


def later(seconds: float, action: Callable[[], None]) -> None:
    """Do something after a while, unless this process has ended by then."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


class RunControl(Protocol):
    """The other nodes, while the run goes on."""

    assignment: RunAssignment
    actions: RunActions

    def start(self) -> None:
        """Listen to the others from now on."""

    def stop(self, number: int, count: int) -> None:
        """Have every node pass a signal on to its workers."""

    def conclude(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        """Report how this node's workers ended, wait for the others', and return how the run ended."""

    def close(self) -> None:
        """Disconnect from the others."""


@dataclass(slots=True)
class JoinProgress:
    """How far the wait for the nodes has come: shown live on a terminal, else a line now and then.

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
        """Return the time since the wait began."""
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
        """Remove the live line."""
        if self.live is not None:
            self.live("")
