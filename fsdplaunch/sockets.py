"""Sockets: look up names, hold a port until its server listens, have room for many. Standard library only.

The launcher of node 0 tells the other nodes a port at which its agent's store will listen seconds later. It binds
the port first and hands the socket over. Nothing listens before the agent does: who comes early is refused, and
tries again.
"""

import errno
import os
import resource
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

HELD = "FSDPLAUNCH_STORE_SOCKET"
"""Contract variable, not a key: the descriptor of the socket at which the agent's store is to listen."""
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104  (where an address is not this node's own)
_BACKLOG = 2048
_OWN = 256
"""Files that a process opens beside its connections."""
_inherited: list[int] = []


def addresses(host: str, port: int | None, kind: socket.SocketKind = socket.SOCK_STREAM) -> list[Any]:
    """Return the family and the place of each address that a name stands for, as sockets take them."""
    with _known(host):
        return [(found[0], found[4]) for found in socket.getaddrinfo(host, port, type=kind)]


def connected(host: str, port: int, seconds: float) -> socket.socket:
    """Return a connection; each address is tried for so many seconds, and each call waits as long."""
    with _known(host):
        return socket.create_connection((host, port), timeout=seconds)


@contextmanager
def _known(host: str) -> Iterator[None]:
    try:
        yield
    except UnicodeError:
        msg = f"{host[:80]!r} is not the name of a host"
        raise socket.gaierror(socket.EAI_NONAME, msg) from None


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to one address, and at which nothing listens yet.

    Where the address is not this node's (behind address translation), it is bound to all.
    """
    family, place = addresses(host, port)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _share(sock, True)
        sock.bind(place)
    except OSError as error:
        sock.close()
        if error.errno != errno.EADDRNOTAVAIL or host == ALL_ADDRESSES:
            raise
        return bound(ALL_ADDRESSES, port)
    return sock


def held(host: str, port: int = 0) -> socket.socket:
    """Return a socket that is bound as `bound` has it, and keeps all others from listening there."""
    sock = bound(host, port)
    _share(sock, False)  # two sockets that may share a port can both be bound to it
    return sock


def listening(sock: socket.socket) -> tuple[str, int]:
    """Have a bound socket listen; return the address and port by which this node reaches it."""
    _share(sock, True)  # connections of an earlier run that are about to be forgotten are not an obstacle
    sock.listen(_BACKLOG)
    address, port = sock.getsockname()[:2]
    return "127.0.0.1" if address == ALL_ADDRESSES else str(address), int(port)


def take_held(environ: MutableMapping[str, str]) -> socket.socket | None:
    """Return the socket that the launcher holds for this process; None where there is none.

    It is taken out of the environment and kept from programs that are started from here.
    """
    with suppress(ValueError, OSError):
        descriptor = int(environ.pop(HELD, ""))
        os.set_inheritable(descriptor, False)
        return socket.socket(fileno=descriptor)
    return None


def _share(sock: socket.socket, is_shared: bool) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(is_shared))


def make_room(connections: int) -> None:
    """Raise the soft limit so that so many connections can be open, as far as the hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OWN
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    _inherited[:] = _inherited or [soft]
    highest = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))


@contextmanager
def inherited_limit() -> Iterator[None]:
    """Have the limit be what it was at the start of this process, for what the body starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, ((_inherited or [soft])[0], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
