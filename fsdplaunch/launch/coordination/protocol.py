"""Messages between the launchers of one run: one JSON object per line over a TCP connection.

Nothing that arrives is ever executed. Whoever can reach the port can take part, as with torch's own store: it is
for the network inside a cluster.
"""

import json
import selectors
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
PROTOCOL = "fsdplaunch-1"
"""First word of a node's first message; another version's launchers are named instead of misread."""
MAX_BYTES = 8 * 1024**2
"""Longest line that is read: an outcome holds the last lines of every worker of a node."""
_CHUNK, _PLENTY = 65536, 4096


class ProtocolError(Exception):
    """The other side does not speak this protocol."""


class Connection:
    """One connection that never blocks; what cannot be sent at once waits here."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.open = True
        self._in = b""
        self._out = b""

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self.sock.fileno()

    @property
    def wants(self) -> int:
        """Return what to wait for, in `selectors`' terms."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)

    def send(self, **message: Any) -> None:
        """Send a message, or as much of it as the network takes now."""
        if self.open:
            self._out += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        """Send more of what waits."""
        try:
            while self._out:
                self._out = self._out[self.sock.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; close the connection when the other side has.

        Raises:
            ProtocolError: What arrived is not a message.
        """
        try:
            while chunk := self.sock.recv(_CHUNK):
                self._in += chunk
            self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *lines, self._in = self._in.split(b"\n")
        if len(self._in) > MAX_BYTES:
            raise ProtocolError
        return [_read(line) for line in lines]

    def close(self) -> None:
        """End the connection."""
        self.open = False
        self.sock.close()


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
        """Return what has been posted since; called by the loop."""
        with suppress(OSError):
            while self.reader.recv(_PLENTY):
                pass
        return [self._posted.pop(0) for _ in range(len(self._posted))]


def wait_for(
    waiters: Iterable[socket.socket | Connection], mail: WakeUp, seconds: float
) -> set[socket.socket | Connection]:
    """Wait until one of them can be read from or sent to, or until there is mail; return those that can.

    Args:
        waiters: A listening socket, and connections that are open.
        mail: Ends the wait as well.
        seconds: How long to wait at most.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(mail.reader, selectors.EVENT_READ)
        for waiter in waiters:
            wants = waiter.wants if isinstance(waiter, Connection) else selectors.EVENT_READ
            selector.register(waiter.fileno(), wants, waiter)
        return {key.data for key, _ in selector.select(seconds) if key.data is not None}


def _read(line: bytes) -> Message:
    try:
        value = json.loads(line)
    except ValueError:
        raise ProtocolError from None
    if not isinstance(value, dict):
        raise ProtocolError
    return value


def text_of(message: Mapping[str, Any], name: str) -> str:
    """Return a text of a message; empty when it holds none."""
    value = message.get(name)
    return value if isinstance(value, str) else ""


def number_of(message: Mapping[str, Any], name: str) -> int | None:
    """Return an integer of a message; None when it holds none."""
    value = message.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
