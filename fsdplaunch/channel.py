"""How two processes of one user talk: JSON messages over a socket, with open files handed along.

A message is its length (4 bytes) and its text; files travel with the length, so that they cannot part from it.
"""

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_LENGTH = struct.Struct(">I")
_TIME = struct.Struct("@ll")
_MAX_FILES = 8
_MAX_BYTES = 1 << 26
"""More than the kernel lets a process have of arguments and variables."""

Message = dict[str, Any]


class Channel:
    """One end of a conversation. Not safe for use by two threads."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._end.fileno()

    def limit_waiting(self, seconds: float) -> None:
        """Have `send` and `receive` give up where the other end does nothing for so long; 0 waits for ever."""
        whole, part = divmod(round(seconds * 1e6), 1_000_000)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._end.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(whole, part))

    def send(self, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message, and duplicates of these descriptors."""
        text = json.dumps(message).encode()
        socket.send_fds(self._end, [_LENGTH.pack(len(text))], list(files))
        self._end.sendall(text)

    def receive(self) -> tuple[Message, list[int]] | None:
        """Wait for a message; return it and the descriptors with it, or None when the other end has gone.

        Raises:
            BlockingIOError: Nothing came within the time of `limit_waiting`.
            ValueError: What came is not a message; the descriptors that came with it are closed.
        """
        try:
            head, files, _, _ = socket.recv_fds(self._end, _LENGTH.size, _MAX_FILES, socket.MSG_WAITALL)
        except ConnectionResetError:  # it has gone without reading our last message
            return None
        message = None
        try:
            if len(head) == _LENGTH.size:
                message = self._read_message(_LENGTH.unpack(head)[0])
        finally:
            if message is None:
                for file in files:
                    os.close(file)
        return (message, list(files)) if message is not None else None

    def close(self) -> None:
        """Give up this end; the other end's next `receive` returns None."""
        self._end.close()

    def _read_message(self, length: int) -> Message | None:
        if length > _MAX_BYTES:
            msg = f"a message of {length} bytes"
            raise ValueError(msg)
        text = bytearray()
        while len(text) < length:
            part = self._end.recv(min(length - len(text), 1 << 20))
            if not part:
                return None
            text += part
        try:
            message = json.loads(text)
        except RecursionError:
            message = None
        if not isinstance(message, dict):
            msg = "a message that is not an object"
            raise ValueError(msg)
        return message


def open_channel() -> tuple[Channel, Channel]:
    """Make two ends that are connected to each other; neither survives an exec."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(one), Channel(other)
