"""Where a process listens: ports, and HOST:PORT. Standard library only."""

from typing import Any

from fsdplaunch.config.schema.parsers import parse_text, parse_whole

MAX_PORT = 65535

RENDEZVOUS_PORT = 29400
"""Where nodes meet when an endpoint names no port, as torchrun has it."""


def port_number(value: Any) -> int:
    """Return a TCP port; 0 means a free one."""
    port = parse_whole(value)
    if not 0 <= port <= MAX_PORT:
        raise ValueError(value)
    return port


def parse_endpoint(value: Any) -> str:
    """Read HOST:PORT; a host with colons stands in brackets. Without a port, the one that torchrun takes."""
    text = parse_text(value)
    if ":" not in text or text.endswith("]"):
        text = f"{text}:{RENDEZVOUS_PORT}"
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not bare or any(mark in host for mark in " /") or (":" in bare and bare == host):
        raise ValueError(value)
    return f"{host}:{port_number(port)}"


def join_endpoint(host: str, port: int) -> str:
    """Write HOST:PORT; a host with colons of its own stands in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
