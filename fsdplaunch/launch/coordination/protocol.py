"""What the launchers of one run say to each other: first a proof, then one JSON object per line, over TCP.

    coordinator    fsdplaunch-5 NONCE
    node           NONCE PROOF, or `none` where it has no secret
    coordinator    PROOF, or `no`

Nothing else is read before, and no more than a line of 256 bytes. The secret itself is never sent. What follows is
not encrypted: it says nothing that is secret. Nothing that arrives is ever executed, and every field that any
handler looks at has its type here: a message that differs is none.
"""

import json
import math
import re
import secrets
import selectors
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from fsdplaunch.files import Maybe, matches
from fsdplaunch.run_secret import is_proof, proof

Message = dict[str, Any]
_LARGEST = 2**63
PROTOCOL = "fsdplaunch-5"
"""First word that a coordinator says; another version's launchers are named instead of misread."""
_LINE_BYTES = 256
"""Longest line before the proof."""
NONE, REFUSED = "none", "no"
_NONCE = re.compile(r"[0-9a-f]{32}")
MAX_BYTES = 8 * 1024**2
"""Longest line that is read: an outcome holds the last lines of every worker of a node."""
_CHUNK, _PLENTY = 65536, 4096
_WAITING_BYTES = 4 * MAX_BYTES
"""Most that waits to be sent to a side that does not read."""
_TURN_BYTES = 2 * 1024**2
"""Most that is read of one connection before the others get their turn."""


class ProtocolError(Exception):
    """The other side does not speak this protocol."""


def _is_integer(value: Any) -> bool:
    return type(value) is int and -_LARGEST <= value < _LARGEST


def _is_natural(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_port(value: Any) -> bool:
    return _is_natural(value) and value < 65536  # noqa: PLR2004  (16 bits)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_probe(value: Any) -> bool:
    return isinstance(value, list) and list(map(type, value)) == [int, str] and _is_port(value[0])


_TEXT, _NUMBER = Maybe(str), Maybe(_is_integer)
_WORKER = {
    "rank": _is_natural,
    "local_rank?": _is_natural,
    "pid?": _is_integer,
    "code?": _NUMBER,
    "signal?": _TEXT,
    "sent?": [_is_integer],
    "started_ns?": _NUMBER,
    "ended_ns?": _NUMBER,
    "peak_bytes?": _NUMBER,
    "steps?": _NUMBER,
    "error?": Maybe({"message": str, "traceback?": _TEXT, "time_ns?": _NUMBER}),
    "tail?": [str],
    "host?": str,
    "node?": _is_integer,
}
_ATTEMPT = {"workers": [_WORKER], "attempt?": _is_natural, "cause?": Maybe(_WORKER)}
_OUTCOME = {"status": _is_integer, "stopped_by": _TEXT, "error": _TEXT, "attempt": Maybe(_ATTEMPT)}
_FINAL = {
    "status": _is_integer,
    "stopped_by": _TEXT,
    "cause": Maybe(_WORKER),
    "error": _TEXT,
    "lost": [str],
    "workers": [_WORKER],
    "host?": str,
}
_NODE = {
    "host": str,
    "address": str,
    "rank?": Maybe(_is_natural),
    "workers?": _is_natural,
    "versions?": {"*": str},
    "config?": {"*": str},
    "command?": [str],
    "script?": str,
    "obstacles?": [str],
    "probe?": _is_probe,
    "folder?": str,
}
_TARGET = {"rank": _is_natural, "name": str, "address": str, "port": _is_port, "word": str}
_MEMBERS = {"change": _is_natural, "place": _is_natural, "nodes": _is_natural}
_RUN = {"run_id": str, "rank": _is_natural, "names": [str], "world": _is_natural} | _MEMBERS

TO_COORDINATOR: Mapping[str, Any] = {
    "hello": {"node": _NODE, "time_ns": _is_natural, "run_id": str},
    "reached": {"failed": [str]},
    "stop": {"number": _is_natural, "count": _is_natural},
    "outcome": {"outcome": _OUTCOME},
    "ping": {},
}
"""What a node may send."""
TO_NODE: Mapping[str, Any] = {
    "refused": {"message": str, "hint": _TEXT},
    "waiting": {"here": _is_natural, "of": _is_natural},
    "try": {"nodes": [_TARGET]},
    "go": {**_RUN, "store_port": _is_port, "silence": _is_time, "notes": [str]},
    "stop": {"number": _is_natural, "count": _is_natural},
    "end": {"at_once": bool},
    "members": _MEMBERS,
    "final": {"final": _FINAL},
    "ping": {},
}
"""What the coordinator may send."""


def decode(line: bytes, kinds: Mapping[str, Any]) -> Message:
    """Read one message.

    Args:
        line: As it arrived, without its end.
        kinds: `TO_COORDINATOR` or `TO_NODE`.

    Raises:
        ProtocolError: It is none of these.
    """
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
        kind = value.get("kind") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind in kinds and matches(value, kinds[kind]):
            return dict(value)
    except (ValueError, RecursionError):  # too deep, too many digits, no UTF-8, no JSON
        pass
    raise ProtocolError


def _refuse_constant(word: str) -> None:
    msg = f"{word} is not a number"
    raise ValueError(msg)


class VersionError(ProtocolError):
    """The coordinator speaks another version; its text is that version."""


class CoordinatorHandshake:
    """The coordinator's side of one connection."""

    def __init__(self, secret: str) -> None:
        self._secret, self._nonce = secret, secrets.token_hex(16)

    @property
    def opening(self) -> str:
        """Return the line to send first."""
        return f"{PROTOCOL} {self._nonce}"

    def answer(self, line: str) -> tuple[bool, str]:
        """Return whether a node's line proves that it belongs to the run, and the line to send it.

        Raises:
            ProtocolError: It is not a node at all.
        """
        if line == NONE:
            return False, REFUSED
        nonce, _, given = line.partition(" ")
        if not _NONCE.fullmatch(nonce):
            raise ProtocolError
        if not is_proof(given, self._secret, "node", self._nonce, nonce):
            return False, REFUSED
        return True, proof(self._secret, "coordinator", nonce, self._nonce)


class NodeHandshake:
    """A node's side of one connection."""

    def __init__(self, secret: str) -> None:
        self._secret, self._own, self._theirs = secret, secrets.token_hex(16), ""

    def reply(self, opening: str) -> str:
        """Return the line to send after the coordinator's first.

        Raises:
            VersionError: It speaks another version.
            ProtocolError: It is not a coordinator.
        """
        version, _, nonce = opening.partition(" ")
        if not version.startswith("fsdplaunch-") or not _NONCE.fullmatch(nonce):
            raise ProtocolError
        if version != PROTOCOL:
            raise VersionError(version)
        self._theirs = nonce
        return f"{self._own} {proof(self._secret, 'node', nonce, self._own)}" if self._secret else NONE

    def is_accepted(self, line: str) -> bool:
        """Return whether the coordinator took the proof; False where it refused it.

        Raises:
            ProtocolError: It does not know the secret itself.
        """
        if line == REFUSED:
            return False
        if not is_proof(line, self._secret, "coordinator", self._own, self._theirs):
            raise ProtocolError
        return True


class Connection:
    """One connection that never blocks; what cannot be sent at once waits here.

    Attributes:
        limit: Longest line that is read; short until the other side has proven to belong to the run.
    """

    def __init__(self, sock: socket.socket, kinds: Mapping[str, Any]) -> None:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.open = True
        self.limit = _LINE_BYTES
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
