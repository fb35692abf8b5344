"""Messages between the launchers of one run: one JSON object per line over a TCP connection.

Nothing that arrives is ever executed, and nothing is read of those who have not proven to belong to the run
(`handshake`).
"""

import json
import selectors
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from fsdplaunch.launch.coordination.handshake import LINE_BYTES
from fsdplaunch.launch.coordination.wire_types import Check, Message, ProtocolError, decode

MAX_BYTES = 8 * 1024**2
"""Longest line that is read: an outcome holds the last lines of every worker of a node."""
_CHUNK, _PLENTY = 65536, 4096
_WAITING_BYTES = 4 * MAX_BYTES
"""Most that waits to be sent to a side that does not read."""
_TURN_BYTES = 2 * 1024**2
"""Most that is read of one connection before the others get their turn."""


class Connection:
    """One connection that never blocks; what cannot be sent at once waits here.

    Attributes:
        limit: Longest line that is read; short until the other side has proven to belong to the run.
    """

    def __init__(self, sock: socket.socket, kinds: Mapping[str, Check]) -> None:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.open = True
        self.limit = LINE_BYTES
        self._kinds = kinds
        self._in = bytearray()
        self._searched = 0
        self._out = bytearray()
        self._selector: selectors.BaseSelector | None = None
        self._watched = 0
        self._data: Any = None
        self._ended: Callable[[], None]

    def watch(self, selector: selectors.BaseSelector, data: Any, ended: Callable[[], None]) -> None:
        """Have a selector wait for this connection until it is closed.

        Args:
            selector: Waits for many connections; told of changes, and not asked anew at each turn.
            data: What it is to give back.
            ended: Called when the connection is closed, whoever closes it.
        """
        self._selector, self._data, self._watched = selector, data, self.wants
        self._ended = ended
        selector.register(self.sock, self.wants, data)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self.sock.fileno()

    @property
    def wants(self) -> int:
        """Return what to wait for, in `selectors`' terms."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)

    def trust(self) -> None:
        """Read messages from now on: the other side has proven to belong to the run."""
        self.limit = MAX_BYTES

    def send(self, **message: Any) -> None:
        """Send a message, or as much of it as the network takes now."""
        self.send_line(encode(message))

    def send_line(self, line: str) -> None:
        """Send a line of the handshake."""
        if self.open:
            self._out += line.encode() + b"\n"
            self.flush()
            if len(self._out) > _WAITING_BYTES:
                self.close()

    def flush(self) -> None:
        """Send more of what waits."""
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        if self._selector is not None and self.open and self.wants != self._watched:
            self._watched = self.wants
            self._selector.modify(self.sock, self.wants, self._data)

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; close the connection when the other side has.

        Raises:
            ProtocolError: What arrived is not a message.
        """
        self._fill()
        return [decode(line, self._kinds) for line in self._lines()]

    def receive_line(self) -> str | None:
        """Return a line of the handshake, if one has arrived.

        Raises:
            ProtocolError: It is too long, or no text.
        """
        self._fill()
        for line in self._lines(most=1):
            if not line.isascii():
                raise ProtocolError
            return line.decode("ascii").rstrip("\r")
        return None

    def _fill(self) -> None:
        """Read what has arrived, but no more than a line may have, and not for ever."""
        room = min(self.limit + 1, _TURN_BYTES)
        try:
            while room > 0 and len(self._in) <= self.limit:
                chunk = self.sock.recv(min(_CHUNK, room))
                if not chunk:
                    self.close()
                    return
                self._in += chunk
                room -= len(chunk)
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def _lines(self, most: int | None = None) -> list[bytes]:
        """Take whole lines out of what has arrived.

        Raises:
            ProtocolError: One is too long.
        """
        lines: list[bytes] = []
        start = 0
        while (most is None or len(lines) < most) and (
            end := self._in.find(b"\n", max(start, self._searched))
        ) >= 0:
            lines.append(bytes(self._in[start:end]))
            start = end + 1
        del self._in[:start]
        self._searched = 0 if len(lines) == most else len(self._in)  # so far there is no end of a line
        if self._searched > self.limit or any(len(line) > self.limit for line in lines):
            raise ProtocolError
        return lines

    def close(self) -> None:
        """End the connection."""
        if self.open and self._selector is not None:
            self._selector.unregister(self.sock)
            self._ended()
        self.open = False
        self.sock.close()


def encode(message: Message) -> str:
    """Return a message as the line that is sent."""
    return json.dumps(message)


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


def wait_for(waiters: Iterable[Connection], mail: WakeUp, seconds: float) -> set[Connection]:
    """Wait until one of them can be read from or sent to, or until there is mail; return those that can.

    Args:
        waiters: Connections that are open.
        mail: Ends the wait as well.
        seconds: How long to wait at most.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(mail.reader, selectors.EVENT_READ)
        for waiter in waiters:
            selector.register(waiter.fileno(), waiter.wants, waiter)
        return {key.data for key, _ in selector.select(seconds) if key.data is not None}
