"""The side channel: a connection between rank 0 and each other rank, apart from the process group.

Rank 0 listens only while the others connect, on loopback if all ranks are on this machine. Whoever connects proves
within seconds that it is a rank of the run; strangers, however many and however slow, are dropped and keep no rank
waiting. Messages are JSON with their length in front; the bytes of a shard follow the message that announces them.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives.rank_group import from_rank_0
from fsdplaunch.runtime.rank import rank_variable
from fsdplaunch.sockets import ALL_ADDRESSES, addresses, bound, connected, listening

CONNECT_SECONDS = 60.0
GREETING_SECONDS = 5.0  # how long a connection may take to say which rank it is
UNPROVEN = 256
"""How many may be about to say it; of more, the oldest goes."""
_BACKLOG = 2048
_SECRET_BYTES = 32
_RANK = struct.Struct("!I")
_LENGTH = struct.Struct("!Q")
_LARGEST_MESSAGE = 1 << 20


class Connection:
    """A stream to one other rank; each method raises CheckpointError where that is gone."""

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
            msg = f"rank {self.rank} sent {length} bytes, expected at most {most}"
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
            msg = f"rank {self.rank} ended while rank 0 was saving a tensor of which it holds a shard"
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
    """Connect rank 0 with all other ranks, in order, and those with rank 0; all ranks call it together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    on_one_node = int(rank_variable("LOCAL_WORLD_SIZE") or size) == size
    # Each rank's own name for rank 0's node: ranks of several nodes may know it by different ones.
    address = "127.0.0.1" if on_one_node else rank_variable("MASTER_ADDR") or "127.0.0.1"
    if rank == 0:
        sock, secret = bound(_bindable(address), 0), secrets.token_bytes(_SECRET_BYTES)
        from_rank_0((listening(sock)[1], secret.hex()))
        with ThreadPoolExecutor(1) as pool:  # a script's main thread may run a loop of its own
            streams = pool.submit(asyncio.run, accept(sock, size, secret)).result()
        return [Connection(other, stream) for other, stream in streams]
    port, known = from_rank_0(None)
    try:
        stream = connected(address, port, CONNECT_SECONDS)
        stream.sendall(greeting(bytes.fromhex(known), rank))
    except OSError as error:
        msg = f"this rank cannot connect to rank 0 at {address}, port {port}: {error.strerror or error}"
        raise CheckpointError(msg, hint="does a firewall let connections to free ports through?") from None
    stream.settimeout(None)
    return [Connection(0, stream)]


def greeting(secret: bytes, rank: int) -> bytes:
    """Return what a rank sends first."""
    return secret + _RANK.pack(rank)


async def accept(sock: socket.socket, size: int, secret: bytes) -> list[tuple[int, socket.socket]]:
    """Return the other ranks and their streams, in order; nothing listens at the socket any more."""
    found: dict[int, socket.socket] = {}
    unproven: list[asyncio.StreamWriter] = []
    complete = asyncio.Event()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read what a connection says first; keep the stream of a rank, and drop any other."""
        unproven.append(writer)
        if len(unproven) > UNPROVEN:
            unproven[0].transport.abort()
        said = b""
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            said = await asyncio.wait_for(reader.readexactly(_SECRET_BYTES + _RANK.size), GREETING_SECONDS)
        unproven.remove(writer)
        rank = _RANK.unpack(said[_SECRET_BYTES:])[0] if hmac.compare_digest(said[:_SECRET_BYTES], secret) else 0
        if 0 < rank < size and rank not in found:
            found[rank] = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
            found[rank].setblocking(True)
        writer.transport.abort()
        if len(found) == size - 1:
            complete.set()

    # Strangers that are dropped are nobody's news: asyncio prints a traceback for each that is there at the end.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    server = await asyncio.start_server(hear, sock=sock, backlog=_BACKLOG)
    try:
        await asyncio.wait_for(complete.wait(), CONNECT_SECONDS)
    except TimeoutError:
        missing = [rank for rank in range(1, size) if rank not in found]
        msg = f"ranks {missing} did not connect to rank 0 within {CONNECT_SECONDS:.0f} s"
        raise CheckpointError(msg) from None
    finally:
        server.close()
        for writer in unproven:
            writer.transport.abort()
    return sorted(found.items())


def _bindable(address: str) -> str:
    """Return where to listen; everywhere where a name means this machine alone, as Debian has its own name."""
    found: Any = addresses(address, None)[0][1][0]
    is_loopback = ipaddress.ip_address(found.partition("%")[0]).is_loopback
    return ALL_ADDRESSES if is_loopback and address not in (found, "localhost") else str(found)
