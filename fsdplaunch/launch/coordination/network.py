"""Addresses and interfaces of this node, and whether another one can be reached. Standard library only."""

import array
import fcntl
import ipaddress
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from fsdplaunch.config.schema.config import Config
from fsdplaunch.sockets import addresses, connected

_SIOCGIFADDR = 0x8915
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation: asking for the way to them sends nothing."""
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104  (only where the others come to several addresses of this node)
_BACKLOG = 4096
_PROBE_SECONDS = 5.0
_GLANCE_SECONDS = 1.0
_PAUSE_SECONDS = 0.01


def interfaces() -> dict[str, str]:
    """Return each interface's IPv4 address, by the interface's name, in the kernel's order."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            with suppress(OSError):
                fcntl.ioctl(query.fileno(), _SIOCGIFADDR, request, True)
                found[name] = socket.inet_ntoa(request.tobytes()[20:24])
    return found


def is_loopback(address: str) -> bool:
    """Return whether only this node can reach an address."""
    return address.startswith("127.") or address in ("::1", "localhost")


def own_address() -> str:
    """Return the address this node would use to reach the world; else the first that is not loopback."""
    for elsewhere in _ELSEWHERE:
        if address := address_towards(elsewhere):
            return address
    return next((own for own in interfaces().values() if not is_loopback(own)), "127.0.0.1")


def address_towards(host: str) -> str | None:
    """Return the address of this node on the way to a host, asked of the kernel's routes; None without a way."""
    with suppress(OSError):
        family, place = addresses(host, 9, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.connect(place)
            return str(trial.getsockname()[0])
    return None


def resolve(host: str) -> list[str]:
    """Return the addresses a name stands for; empty when it is not known."""
    try:
        found = addresses(host, None)
    except OSError:
        return []
    return list(dict.fromkeys(str(place[0]) for _, place in found))


def is_own(address: str) -> bool:
    """Return whether this node has an address: only then can something listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((address, 0))
            return True
    except OSError:
        return False


def own_address_of(host: str) -> str | None:
    """Return the address by which a name means this node; None when it means another one, or is not known."""
    return next((address for address in resolve(host) if is_own(address)), None)


def plain_address(place: Sequence[Any]) -> str:
    """Return a socket's address; an IPv4 one in an IPv6 socket as what it is."""
    return str(place[0]).removeprefix("::ffff:")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; on every address when `host` is empty.

    Raises:
        OSError: The port is taken, or the address is not this node's.
    """
    family = socket.AF_INET6 if ":" in host or (not host and socket.has_dualstack_ipv6()) else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


class ReachabilityProbe:
    """A free port that answers with this node's own word, so that others can see whether they reach it."""

    def __init__(self, address: str) -> None:
        self.word = secrets.token_hex(8)
        self._sock = listen(address, 0)
        self.port = int(self._sock.getsockname()[1])
        self._is_closed = False
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while not self._is_closed:
            try:
                visitor, _ = self._sock.accept()
                with visitor:
                    visitor.sendall(self.word.encode())
            except OSError:  # a visitor that has gone again, or too many open files: the next one is answered
                time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """Stop answering."""
        self._is_closed = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._sock.close()


def shorten_name_lookups(host: str, environ: MutableMapping[str, str]) -> None:
    """Have the C library give up a name after a second, where no name has to be found.

    Torch's store asks for the names of its peers, to mention them. Where no name server answers, each asking takes
    the library's five seconds.

    Args:
        host: Where the store is; with a name, lookups stay as they are.
        environ: This process's variables; what is set there stays.
    """
    with suppress(ValueError):
        ipaddress.ip_address(host)
        environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def reach(address: str, port: int, word: str) -> str | None:
    """Try to reach another node's probe; return what is wrong, or None.

    Args:
        address: Where the other node says it is.
        port: Its probe's.
        word: What its probe answers.
    """
    try:
        with connected(address, port, _PROBE_SECONDS) as probe:
            answer = b""
            while len(answer) < len(word) and (part := probe.recv(64)):
                answer += part
    except OSError as error:
        return reason(error)
    return None if answer.decode(errors="replace") == word else "another node answers there"


def answers(host: str, port: int) -> bool:
    """Return whether anything listens somewhere."""
    try:
        with connected(host, port, _GLANCE_SECONDS):
            return True
    except OSError:
        return False


def reason(error: OSError) -> str:
    """Return why a connection was not made, in a few words."""
    if isinstance(error, socket.gaierror):
        return "the name is not known"
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error) or type(error).__name__).lower()


def interface_variables(
    config: Config, address: str, environ: Mapping[str, str], *, alone: bool = False
) -> dict[str, str]:
    """Return the variables that keep gloo, and NCCL where an interface is configured, on the network of the nodes.

    By itself gloo takes the address of this node's own name, which Debian maps to 127.0.1.1. A lone node needs no
    network: there both stay on the loopback interface.

    Args:
        config: Resolved.
        address: This node's, as the others reach it.
        environ: The caller's variables; what is set there stays.
        alone: There is no other node.
    """
    asked = config.launch.network_interface
    name = asked or next((name for name, own in interfaces().items() if own == address), None)
    both = asked or alone
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if both else ("GLOO_SOCKET_IFNAME",)
    return {variable: name for variable in names if name and variable not in environ}
