"""What the launchers of one run say to each other: first a proof, then one JSON object per line, over TCP.

    coordinator    fsdplaunch-7 NONCE
    node           NONCE PROOF, or `none` where it has no secret
    coordinator    PROOF, or `no`

Nothing else is read before, and no more than a line of 256 bytes. The secret itself is never sent. What follows is
not encrypted: it says nothing that is secret. Nothing that arrives is ever executed, and every field that any
handler looks at has its type here: any other message is refused.
"""

import asyncio
import json
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from fsdplaunch.files import Maybe, matches
from fsdplaunch.launch.remote_steps import ROW
from fsdplaunch.run_secret import is_proof, proof

Message = dict[str, Any]
PROTOCOL = "fsdplaunch-7"
"""First word that a coordinator says; another version's launchers are named instead of misread."""
_LINE_BYTES = 256
"""Longest line before the proof."""
NONE, REFUSED = "none", "no"
_NONCE = re.compile(r"[0-9a-f]{32}")
MAX_BYTES = 8 * 1024**2
"""Longest line that is read: an outcome holds the last lines of every worker of a node."""
_WAITING_BYTES = 4 * MAX_BYTES
"""Most that waits to be sent to a side that does not read."""


def _whole(least: int, end: int) -> Callable[[Any], bool]:
    """Return what tells whole numbers of a range from all else; True and False are none."""
    return lambda value: type(value) is int and least <= value < end


_INTEGER, _NATURAL, _PORT = _whole(-(2**63), 2**63), _whole(0, 2**63), _whole(0, 2**16)
_TEXT, _NUMBER = Maybe(str), Maybe(_INTEGER)
_WORKER = {
    **dict.fromkeys(("rank", "local_rank?"), _NATURAL),
    **dict.fromkeys(("pid?", "node?"), _INTEGER),
    **dict.fromkeys(("code?", "started_ns?", "ended_ns?", "ran_ns?", "peak_bytes?", "steps?"), _NUMBER),
    **{"signal?": _TEXT, "host?": str, "sent?": [_INTEGER], "tail?": [str]},
    "error?": Maybe({"message": str, "traceback?": _TEXT, "time_ns?": _NUMBER, "status?": _NUMBER}),
}
_ATTEMPT = {"workers": [_WORKER], "attempt?": _NATURAL, "ran_ns?": _NUMBER, "cause?": Maybe(_WORKER)}
_END = {"status": _INTEGER, "stopped_by": _TEXT, "error": _TEXT}
_FINAL = {**_END, "cause": Maybe(_WORKER), "lost": [str], "workers": [_WORKER], "host?": str}
_NODE = {
    **dict.fromkeys(("host", "address", "script?"), str),
    **{name: [str] for name in ("command?", "obstacles?")},
    **{name: {"*": str} for name in ("versions?", "config?")},
    **{"rank?": Maybe(_NATURAL), "workers?": _NATURAL, "port?": _PORT},
}
_SIGNAL = {"number": _NATURAL, "count": _NATURAL}
_MEMBERS = {"change": _NATURAL, "place": _NATURAL, "nodes": _NATURAL}
_RUN = {"run_id": str, "rank": _NATURAL, "names": [str], "world": _NATURAL, **_MEMBERS}
_SECONDS = {"silence": lambda value: type(value) in (int, float) and 0 < value < math.inf}

TO_COORDINATOR: Mapping[str, Any] = {
    "hello": {"node": _NODE, "time_ns": _NATURAL, "run_id": str},
    "reached": {"why_not": str},
    "stop": _SIGNAL,
    "steps": {"ranks": [ROW]},
    "outcome": {"outcome": {**_END, "attempt": Maybe(_ATTEMPT)}},
    "ping": {},
}
"""What a node may send."""
TO_NODE: Mapping[str, Any] = {
    "refused": {"message": str, "hint": _TEXT},
    "waiting": {"here": _NATURAL, "of": _NATURAL},
    "try": {"address": str, "port": _PORT},
    "go": {**_RUN, **_SECONDS, "store_port": _PORT, "notes": [str]},
    "stop": _SIGNAL,
    "end": {"at_once": bool},
    "members": _MEMBERS,
    "final": {"final": _FINAL},
    "ping": {},
}
"""What the coordinator may send."""


class ProtocolError(Exception):
    """The other side does not speak this protocol; its text is the version where it speaks another one."""


def decode(line: bytes, kinds: Mapping[str, Any]) -> Message:
    """Read one message of these kinds; a line that is none of them raises a ProtocolError."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        value = json.loads(line, parse_constant=refuse)  # NaN is no JSON
        kind = value.get("kind") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind in kinds and matches(value, kinds[kind]):
            return dict(value)
    except (ValueError, RecursionError):  # too deep, too many digits, no UTF-8, no JSON
        pass
    raise ProtocolError


class CoordinatorHandshake:
    """The coordinator's side of one connection."""

    def __init__(self, secret: str) -> None:
        self._secret, self._nonce = secret, secrets.token_hex(16)
        self.opening = f"{PROTOCOL} {self._nonce}"
        """The line to send first."""

    def answer(self, line: str) -> tuple[bool, str]:
        """Return whether a node's line proves that it belongs to the run, and the line to send it."""
        nonce, _, given = line.partition(" ")
        if line != NONE and not _NONCE.fullmatch(nonce):
            raise ProtocolError
        if not is_proof(given, self._secret, "node", self._nonce, nonce):
            return False, REFUSED
        return True, proof(self._secret, "coordinator", nonce, self._nonce)


class NodeHandshake:
    """A node's side of one connection."""

    def __init__(self, secret: str) -> None:
        self._secret, self._own, self._theirs = secret, secrets.token_hex(16), ""

    def reply(self, opening: str) -> str:
        """Return the line to send after the coordinator's first."""
        version, _, self._theirs = opening.partition(" ")
        if not version.startswith("fsdplaunch-") or not _NONCE.fullmatch(self._theirs):
            raise ProtocolError
        if version != PROTOCOL:
            raise ProtocolError(version)
        return f"{self._own} {proof(self._secret, 'node', self._theirs, self._own)}" if self._secret else NONE

    def is_accepted(self, line: str) -> bool:
        """Return whether the coordinator took the proof; a ProtocolError where it has no proof itself."""
        if line != REFUSED and not is_proof(line, self._secret, "coordinator", self._own, self._theirs):
            raise ProtocolError
        return line != REFUSED


class Connection(asyncio.Protocol):
    """One connection in an event loop; what cannot be sent at once waits here.

    Attributes:
        open: It has not ended, and nobody has closed it.
        limit: Longest line that is read: MAX_BYTES once the other side has proven to belong to the run.
        lines: That have come, and that nobody has taken.
        transport: The event loop's side of it.
    """

    def __init__(self, changed: Callable[["Connection"], None]) -> None:
        """Begin before the connection is made; `changed` hears of that, of lines, and of the end."""
        self.open, self.limit = True, _LINE_BYTES
        self.lines: deque[bytes] = deque()
        self.transport: Any = None
        self._changed = changed
        self._in = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the event loop's side."""
        self.transport = transport
        self._changed(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (asyncio's name)
        """Note the end."""
        self.open = False
        self._changed(self)

    def data_received(self, data: bytes) -> None:
        """Take whole lines out of what has come; one that is too long ends the connection."""
        at = len(self._in)
        self._in += data
        while (end := self._in.find(b"\n", at)) >= 0:
            self.lines.append(bytes(self._in[:end]))
            del self._in[: end + 1]
            at = 0
        if max([len(self._in), *map(len, self.lines)]) > self.limit:
            self.lines.clear()
            self.close()
        self._changed(self)

    def send(self, **message: Any) -> None:
        """Send a message, or as much of it as the network takes now."""
        self.send_line(json.dumps(message))

    def send_line(self, line: str) -> None:
        """Send a line of the handshake, or a message's text."""
        if self.open:
            self.transport.write(line.encode() + b"\n")
            if self.waiting_bytes > _WAITING_BYTES:
                self.open = False
                self.transport.abort()

    @property
    def waiting_bytes(self) -> int:
        """Return how much waits to be sent."""
        return int(self.transport.get_write_buffer_size()) if self.open else 0

    def close(self) -> None:
        """End the connection, once what waits has been sent."""
        self.open = False
        self.transport.close()


def text_of_line(line: bytes) -> str:
    """Return a line of the handshake, which is ASCII."""
    if not line.isascii():
        raise ProtocolError
    return line.decode("ascii").rstrip("\r")


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report what nobody expected; where there are too many open files, whoever comes waits."""
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)


class Loop:
    """An event loop that one thread at a time runs, turn by turn, and that others may have do something."""

    def __init__(self) -> None:
        self.asyncio = asyncio.new_event_loop()
        self.asyncio.set_exception_handler(_report)
        self._something = asyncio.Event()

    def post(self, action: Callable[[], None]) -> None:
        """Have the loop do something; safe in a signal handler, which may interrupt a thread in here."""

        def act() -> None:
            action()
            self.notice()

        with suppress(RuntimeError):  # it has been closed
            self.asyncio.call_soon_threadsafe(act)

    def notice(self) -> None:
        """End the present turn: something has happened."""
        self._something.set()

    def turn(self, seconds: float) -> None:
        """Handle what comes until something has, or so many seconds are over."""

        async def wait() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._something.wait()
            self._something.clear()

        self.asyncio.run_until_complete(wait())

    def flush(self, connections: Iterable[Connection], seconds: float = 2.0) -> None:
        """Send what waits before the process goes on."""
        end, waiting = time.monotonic() + seconds, list(connections)
        while any(one.waiting_bytes for one in waiting) and time.monotonic() < end:
            self.asyncio.run_until_complete(asyncio.sleep(0.01))

    def close(self) -> None:
        """Let connections that were closed go, and end."""
        if not self.asyncio.is_closed():
            self.asyncio.run_until_complete(asyncio.sleep(0))
            self.asyncio.close()
