"""Addresses and interfaces of this node, and whether another one can be reached. Standard library only."""

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from fsdplaunch.config.schema.config import Config
from fsdplaunch.sockets import addresses, connected

_SIOCGIFADDR = 0x8915
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation: asking for the way to them sends nothing."""
_BACKLOG = 4096
_TRY_SECONDS = 5.0
_GLANCE_SECONDS = 1.0


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
    with suppress(OSError):
        return list(dict.fromkeys(str(place[0]) for _, place in addresses(host, None)))
    return []


def is_own(address: str) -> bool:
    """Return whether this node has an address: only then can something listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as trial:
        trial.bind((address, 0))
        return True
    return False


def own_address_of(host: str) -> str | None:
    """Return the address by which a name means this node; None when it means another one, or is not known."""
    return next((address for address in resolve(host) if is_own(address)), None)


def plain_address(place: Sequence[Any]) -> str:
    """Return a socket's address; an IPv4 one in an IPv6 socket as what it is."""
    return str(place[0]).removeprefix("::ffff:")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; on every address when `host` is empty."""
    family = socket.AF_INET6 if ":" in host or (not host and socket.has_dualstack_ipv6()) else socket.AF_INET
    dual = family == socket.AF_INET6
    return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)


def shorten_name_lookups(host: str, environ: MutableMapping[str, str]) -> None:
    """Have the C library give up a name after a second, where the store's own address is a number.

    Torch's store asks for the names of its peers, to mention them. Where no name server answers, each asking takes
    the library's five seconds.
    """
    with suppress(ValueError):
        ipaddress.ip_address(host)
        environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def obstacle_to(address: str, port: int) -> str:
    """Return what keeps this node from connecting to another; empty for nothing."""
    try:
        connected(address, port, _TRY_SECONDS).close()
    except OSError as error:
        return reason(error)
    return ""


def answers(host: str, port: int) -> bool:
    """Return whether anything listens somewhere."""
    with suppress(OSError), connected(host, port, _GLANCE_SECONDS):
        return True
    return False


def reason(error: OSError) -> str:
    """Return why a connection was not made, in a few words."""
    if isinstance(error, socket.gaierror):
        return "the name is not known"
    if isinstance(error, TimeoutError):
        return "no answer"
    return (os.strerror(error.errno) if error.errno else str(error) or type(error).__name__).lower()


def interface_variables(
    config: Config, address: str, environ: Mapping[str, str], *, alone: bool = False
) -> dict[str, str]:
    """Return the variables that keep gloo, and NCCL where an interface is configured, on the network of the nodes.

    By itself gloo takes the address of this node's own name, which Debian maps to 127.0.1.1. A lone node needs no
    network: there both stay on the loopback interface. What the environment has stays.
    """
    asked = config.launch.network_interface
    name = asked or next((name for name, own in interfaces().items() if own == address), None)
    both = asked or alone
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if both else ("GLOO_SOCKET_IFNAME",)
    return {variable: name for variable in names if name and variable not in environ}
