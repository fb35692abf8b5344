"""The side channel: a connection between rank 0 and each other rank, apart from the process group.

Rank 0 listens only while the others connect, on loopback if all ranks are on this machine. Whoever connects proves
within seconds that it is a rank of the run; strangers, however many and however slow, are dropped and keep no rank
waiting. Messages are JSON with their length in front; the bytes of a shard follow the message that announces them.
"""

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.distributed as dist

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives.rank_group import from_rank_0
from fsdplaunch.runtime.rank import rank_variable
from fsdplaunch.sockets import ALL_ADDRESSES, addresses, bound, connected, listening

CONNECT_SECONDS = 60.0
GREETING_SECONDS = 5.0
"""How long a connection may take to say which rank it is."""
UNPROVEN = 256
"""How many may be about to say it; of more, the oldest goes."""
_LOOK_SECONDS = 0.5
_SECRET_BYTES = 32
_RANK = struct.Struct("!I")
_LENGTH = struct.Struct("!Q")
_LARGEST_MESSAGE = 1 << 20


class Connection:
    """A stream to one other rank; each method raises CheckpointError where that is gone.

    Attributes:
        rank: The other.
    """

    def __init__(self, rank: int, stream: socket.socket) -> None:
        self.rank = rank
        self._stream = stream
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        os.register_at_fork(after_in_child=self.close)  # a loader's process must not keep it open

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self.send_bytes(json.dumps(message).encode())

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send bytes with their number before them."""
        with self._gone():
            self._stream.sendall(_LENGTH.pack(len(data)))
            self._stream.sendall(data)

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the next message, which comes within `timeout` seconds."""
        with self._gone():
            self._stream.settimeout(timeout)
            data = bytearray(self._length(_LARGEST_MESSAGE))
            self._fill(memoryview(data))
        message: dict[str, Any] = json.loads(data)
        return message

    def receive_into(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor in host memory with the bytes that come."""
        view = bytes_of(tensor)
        with self._gone():
            if self._length(view.nbytes) != view.nbytes:
                msg = f"rank {self.rank} sent another number of bytes than its shard has"
                raise CheckpointError(msg)
            self._fill(view)

    def _length(self, most: int) -> int:
        head = bytearray(_LENGTH.size)
        self._fill(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > most:
            msg = f"rank {self.rank} sent {length} bytes where at most {most} belong"
            raise CheckpointError(msg)
        return int(length)

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            count = self._stream.recv_into(view)
            if not count:
                raise ConnectionError
            view = view[count:]

    @contextlib.contextmanager
    def _gone(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            msg = f"rank {self.rank} did not answer within {self._stream.gettimeout():.0f} s"
            raise CheckpointError(msg) from None
        except OSError:
            msg = f"rank {self.rank} ended while rank 0 saved what it holds a shard of"
            raise CheckpointError(msg, hint=f"see why in the output of rank {self.rank}") from None

    def wait_until_closed(self, timeout: float) -> None:
        """Wait until the other rank has closed the stream, or ended, or `timeout` seconds."""
        with contextlib.suppress(OSError):
            self._stream.settimeout(timeout)
            self._stream.recv(1)
        self.close()

    def close(self) -> None:
        """Close the stream."""
        with contextlib.suppress(OSError):
            self._stream.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, without a copy."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(array)


def connect() -> list[Connection]:
    """Connect rank 0 with every other rank; all ranks call it together.

    Returns:
        On rank 0 one connection per other rank, in order; elsewhere the one to rank 0.

    Raises:
        CheckpointError: Some cannot connect.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    on_one_node = int(rank_variable("LOCAL_WORLD_SIZE") or size) == size
    # Each rank's own name for rank 0's node: ranks of several nodes may know it by different ones.
    address = "127.0.0.1" if on_one_node else rank_variable("MASTER_ADDR") or "127.0.0.1"
    if rank == 0:
        with RankListener(address, size) as listener:
            from_rank_0((listener.port, listener.secret.hex()))
            return [Connection(other, stream) for other, stream in listener.accept()]
    port, secret = from_rank_0(None)
    try:
        stream = connected(address, port, CONNECT_SECONDS)
        stream.sendall(greeting(bytes.fromhex(secret), rank))
    except OSError as error:
        msg = f"this rank cannot connect to rank 0 at {address}, port {port}: {error.strerror or error}"
        raise CheckpointError(msg, hint="does a firewall let connections to free ports through?") from None
    stream.settimeout(None)
    return [Connection(0, stream)]


def greeting(secret: bytes, rank: int) -> bytes:
    """Return what a rank sends first."""
    return secret + _RANK.pack(rank)


class RankListener:
    """Takes one connection of each other rank.

    Attributes:
        port: Where it listens.
        secret: What a rank has to know.
    """

    def __init__(self, address: str, size: int) -> None:
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._size = size
        self._found: dict[int, socket.socket] = {}
        self._arrivals: dict[socket.socket, tuple[float, bytearray]] = {}  # since when and what they said
        self._sock = bound(_bindable(address), 0)
        _, self.port = listening(self._sock)
        self._sock.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._sock, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close everything but the streams that were returned."""
        for stream in list(self._arrivals):
            self._forget(stream).close()
        self._selector.close()
        self._sock.close()

    def accept(self) -> list[tuple[int, socket.socket]]:
        """Return the other ranks and their streams, in order.

        Raises:
            CheckpointError: Some did not connect in time.
        """
        deadline = time.monotonic() + CONNECT_SECONDS
        while missing := [rank for rank in range(1, self._size) if rank not in self._found]:
            if time.monotonic() >= deadline:
                msg = f"ranks {missing} did not connect to rank 0 within {CONNECT_SECONDS:.0f} s"
                raise CheckpointError(msg)
            for key, _ in self._selector.select(_LOOK_SECONDS):
                stream: Any = key.fileobj
                if stream is self._sock:
                    self._welcome()
                elif stream in self._arrivals:
                    self._hear(stream)
            late, too_many = time.monotonic() - GREETING_SECONDS, len(self._arrivals) - UNPROVEN
            for place, (stream, (since, _)) in enumerate(list(self._arrivals.items())):
                if place < too_many or since < late:
                    self._forget(stream).close()
        return sorted(self._found.items())

    def _welcome(self) -> None:
        try:
            stream, _ = self._sock.accept()
            stream.setblocking(False)
        except OSError:  # it has gone again, or there are too many open files: it waits
            time.sleep(0.01)
            return
        self._arrivals[stream] = time.monotonic(), bytearray()
        self._selector.register(stream, selectors.EVENT_READ)

    def _hear(self, stream: socket.socket) -> None:
        """Read what a connection says first; keep the stream of a rank, and drop any other."""
        said, wanted = self._arrivals[stream][1], _SECRET_BYTES + _RANK.size
        try:
            more = stream.recv(wanted - len(said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said += more
        if more and len(said) < wanted:
            return
        self._forget(stream)
        (rank,) = _RANK.unpack(said[_SECRET_BYTES:]) if more else (0,)
        proven = hmac.compare_digest(bytes(said[:_SECRET_BYTES]), self.secret)
        if proven and 0 < rank < self._size and rank not in self._found:
            stream.setblocking(True)
            self._found[rank] = stream
        else:
            stream.close()

    def _forget(self, stream: socket.socket) -> socket.socket:
        del self._arrivals[stream]
        self._selector.unregister(stream)
        return stream


def _bindable(address: str) -> str:
    """Return where to listen; everywhere where a name means this machine alone, as Debian has its own name."""
    found: Any = addresses(address, None)[0][1][0]
    is_loopback = ipaddress.ip_address(found.partition("%")[0]).is_loopback
    return ALL_ADDRESSES if is_loopback and address not in (found, "localhost") else str(found)
