"""How the agent and its fork server talk: JSON messages over a socket pair, with open files handed along.

A message is its length (4 bytes) and its text; files travel with the length, so that they cannot part from it.
"""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_LENGTH = struct.Struct(">I")
_MAX_FILES = 8

Message = dict[str, Any]


class Channel:
    """One end of a conversation. Not safe for use by two threads."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._end.fileno()

    def send(self, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message, and duplicates of these descriptors.

        Raises:
            OSError: The other end has gone.
        """
        text = json.dumps(message).encode()
        socket.send_fds(self._end, [_LENGTH.pack(len(text))], list(files))
        self._end.sendall(text)

    def receive(self) -> tuple[Message, list[int]] | None:
        """Wait for a message; return it and the descriptors with it, or None when the other end has gone."""
        try:
            head, files, _, _ = socket.recv_fds(self._end, _LENGTH.size, _MAX_FILES, socket.MSG_WAITALL)
        except ConnectionResetError:  # it has gone without reading our last message
            return None
        text = self._read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None
        return (json.loads(text), list(files)) if text is not None else None

    def close(self) -> None:
        """Give up this end; the other end's next `receive` returns None."""
        self._end.close()

    def _read(self, length: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < length:
            part = self._end.recv(min(length - len(parts), 1 << 20))
            if not part:
                return None
            parts += part
        return bytes(parts)


def open_channel() -> tuple[Channel, Channel]:
    """Make two ends that are connected to each other; neither survives an exec."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(one), Channel(other)
