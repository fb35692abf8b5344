"""A node that knows the secret and sends what no node would: the coordinator goes on, and no run succeeds by it.

Every message of the protocol with fields left out or of another type; lines that are no JSON, too deep, too long;
all in both directions, before a run and during it.
"""

import json
import random
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from fsdplaunch.errors import MachineError
from fsdplaunch.launch.coordination.node_info import NodeInfo
from fsdplaunch.launch.coordination.protocol import TO_COORDINATOR, TO_NODE, CoordinatorHandshake, NodeHandshake
from scripts.campaigns.attack_classes.case import Case
from tests.joining import SECRET, Place, counter, make_client

COUNT = 240
_WORKER = {
    "rank": 1,
    "code": 1,
    "sent": [],
    "error": {"message": "E: x", "traceback": None, "time_ns": 1},
    "tail": [],
}
_GOOD_END = {"status": 0, "stopped_by": None, "cause": None, "error": None, "lost": [], "workers": []}
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "hello": {
        "node": {
            "host": "h",
            "address": "127.0.0.1",
            "workers": 1,
            "port": 1,
            "config": {},
            "command": [],
        },
        "time_ns": 1,
        "run_id": "",
    },
    "reached": {"why_not": ""},
    "steps": {
        "ranks": [
            {
                **{"rank": 0, "pid": 7, "made": 1, "ended": 1.5, "total": 0, "memory_limit": 0},
                "steps": [[1, 2, 0.5, *[None] * 6]],
            }
        ]
    },
    "outcome": {
        "outcome": {
            "status": 1,
            "stopped_by": None,
            "error": None,
            "attempt": {"workers": [_WORKER], "cause": None},
        }
    },
    "ping": {},
    "stop": {"number": 15, "count": 1},
    "refused": {"message": "no", "hint": None},
    "waiting": {"here": 1, "of": 2},
    "try": {"address": "127.0.0.1", "port": 1},
    "go": {
        **{"run_id": "r", "rank": 1, "names": ["a"], "nodes": 2, "world": 2, "place": 1, "change": 0},
        **{"store_port": 1, "silence": 10.0, "notes": []},
    },
    "end": {"at_once": True},
    "members": {"change": 1, "place": 1, "nodes": 2},
    "final": {"final": _GOOD_END},
}
"""One right message of every kind."""
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 2**70, 1e308, "x", "", [], {}, [[]], {"a": []}, ["x", 3], "\u202e\x1b[2J", "9" * 400),
)


def mutations(value: Any, chance: random.Random) -> Any:
    """Return a value with one part of it changed or left out."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(sorted(value))
        changed = {name: part for name, part in value.items() if name != key}
        return changed if chance.random() < 0.3 else {**changed, key: mutations(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.7:
        return [mutations(value[0], chance), *value[1:]]
    return chance.choice(WRONG)


def lines(kind: str, chance: random.Random) -> bytes:
    """Return a line that is a mutated message of a kind, or nothing at all."""
    broken = (
        b"[" * 200_000,
        b"{" * 9,
        b"\xff\xfe",
        b"null",
        b'{"kind": []}',
        b'{"kind": "ping", "x": NaN}',
        b"1" * 5000,
    )
    if chance.random() < 0.15:
        return chance.choice(broken) + b"\n"
    message = mutations({"kind": kind, **EXAMPLES[kind]}, chance)
    return json.dumps(message).encode() + b"\n"


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: to the coordinator before and during a run, and to a node."""
    ways = (to_coordinator_before, to_coordinator_during, to_node)
    for number in range(count or COUNT):
        way = ways[number % len(ways)]
        kinds = sorted(TO_NODE if way is to_node else TO_COORDINATOR)
        kind = kinds[number // len(ways) % len(kinds)]
        line = lines(kind, chance)
        name = f"{number}: {way.__name__} {kind} {line[:80]!r}"
        yield Case(name=name, attack=lambda way=way, line=line: way(line))


def mad_node(port: int) -> socket.socket:
    """Connect as a node that knows the secret."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=5)
    answers = sock.makefile("rb")
    handshake = NodeHandshake(SECRET)
    sock.sendall(handshake.reply(answers.readline().decode().strip()).encode() + b"\n")
    if not handshake.is_accepted(answers.readline().decode().strip()):
        msg = "the right secret was refused"
        raise AssertionError(msg)
    return sock


def to_coordinator_before(line: bytes) -> None:
    """Send it before the run: a real node still joins, or everybody is told why not."""
    place = Place(2, seconds=8)
    try:
        threading.Thread(target=_send, args=(place.port, line), daemon=True).start()
        joined = place.come(1)
        try:
            assignment = place.coordinator.gather(counter())
        except MachineError:  # a right `hello` that a mutation left right: it takes the place, and goes
            return
        joined.join(10)
        if assignment.world != 2 and b'"hello"' not in line:
            msg = f"another run than two nodes': {assignment}"
            raise AssertionError(msg)
    finally:
        place.close()


def _send(port: int, line: bytes) -> None:
    with mad_node(port) as sock:
        sock.sendall(line)


def to_coordinator_during(line: bytes) -> None:
    """Send it as the other node of a run: this node's own failure stays one, and the launcher ends."""
    place = Place(2, silence=1.0, grace=0.1)
    try:
        sockets: list[socket.socket] = []
        threading.Thread(target=lambda: sockets.append(_join(place)), daemon=True).start()
        place.coordinator.gather(counter())
        place.coordinator.start()
        while not sockets:
            pass
        sockets[0].sendall(line)
        failed = {"status": 7, "stopped_by": None, "error": "own failure", "attempt": None}
        final = place.coordinator.conclude(failed)
        sockets[0].close()
        if final["status"] == 0:
            msg = f"its own rank failed, and the run ended with {final}"
            raise AssertionError(msg)
    finally:
        place.close()


def _join(place: Place) -> socket.socket:
    sock = mad_node(place.port)
    info = asdict(place.node_info(1))
    sock.sendall(json.dumps({"kind": "hello", "node": info, "time_ns": 1, "run_id": ""}).encode() + b"\n")
    sock.sendall(json.dumps({"kind": "reached", "why_not": ""}).encode() + b"\n")
    return sock


def to_node(line: bytes) -> None:
    """Send it to a node that waits: it joins, or says in one sentence why not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_mad_coordinator, args=(listener, line), daemon=True).start()
        node = make_client(listener.getsockname()[1], seconds=0.5)
        try:
            node.connect(counter())
            node.join(NodeInfo(host="h", address="127.0.0.1"), counter())
        except MachineError:
            return


def _mad_coordinator(listener: socket.socket, line: bytes) -> None:
    sock, _ = listener.accept()
    with sock:
        handshake = CoordinatorHandshake(SECRET)
        sock.sendall(handshake.opening.encode() + b"\n")
        _, answer = handshake.answer(sock.makefile("rb").readline().decode().strip())
        sock.sendall(answer.encode() + b"\n" + line)
