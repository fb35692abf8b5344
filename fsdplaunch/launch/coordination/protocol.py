"""Messages between the launchers of one run: one JSON object per line over a TCP connection.

Nothing that arrives is ever executed. Whoever can reach the port can take part, as with torch's own store: it is
for the network inside a cluster.
"""

import json
import selectors
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
PROTOCOL = "fsdplaunch-1"
"""First word of every greeting; another version's launchers are named instead of misread."""
MAX_BYTES = 8 * 1024**2
"""Longest line that is read: an outcome holds the last lines of every worker of a machine."""
_CHUNK = 65536


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

    @property
    def wants(self) -> int:
        """What to wait for, as `selectors` says it."""
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
        """The messages that have arrived; closes the connection when the other side has.

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


def _read(line: bytes) -> Message:
    try:
        value = json.loads(line)
    except ValueError:
        raise ProtocolError from None
    if not isinstance(value, dict):
        raise ProtocolError
    return value


def text_of(message: Mapping[str, Any], name: str) -> str:
    """A text of a message; empty when it holds none."""
    value = message.get(name)
    return value if isinstance(value, str) else ""


def number_of(message: Mapping[str, Any], name: str) -> int | None:
    """A whole number of a message; None when it holds none."""
    value = message.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
