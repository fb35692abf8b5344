"""Those who do not know the secret, at the coordinator's port, before a run and during it: the run ends well.

Wrong first lines, cut lines, endless lines, other protocols, half-open connections, floods, proofs of another
secret or of another conversation. Each case lets a real node join a real coordinator beside its strangers.
"""

import json
import random
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress

from fsdplaunch.launch.coordination.protocol import CoordinatorHandshake, NodeHandshake
from fsdplaunch.launch.coordination.run_control import RunActions, RunAssignment
from scripts.campaigns.attack_classes.case import Case
from tests.joining import SECRET, Place, counter

COUNT = 220
MOST_BYTES = 50e6
_OUTCOME = {"status": 0, "stopped_by": None, "error": None, "attempt": None}
Stranger = Callable[[socket.socket, random.Random], None]


def nothing(_sock: socket.socket, _chance: random.Random) -> None:
    """Connect and say nothing."""


def noise(sock: socket.socket, chance: random.Random) -> None:
    """Send random bytes."""
    sock.sendall(chance.randbytes(chance.choice([1, 255, 256, 257, 5000, 70000])))


def http(sock: socket.socket, chance: random.Random) -> None:
    """Send a request of another protocol."""
    sock.sendall(chance.choice([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"SSH-2.0-OpenSSH_9\r\n", b"HELP\r\n\r\n"]))


def tls(sock: socket.socket, chance: random.Random) -> None:
    """Send a greeting of TLS."""
    sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(506))


def nested(sock: socket.socket, chance: random.Random) -> None:
    """Send JSON that is too deep to read."""
    sock.sendall(chance.choice([b"[", b'{"a":', b"[[{"]) * chance.choice([100, 5000, 200_000]) + b"\n")


def message(sock: socket.socket, chance: random.Random) -> None:
    """Send a message without a proof."""
    kinds = ("hello", "stop", "outcome", "end", "final", "ping")
    sock.sendall(json.dumps({"kind": chance.choice(kinds), "number": 9, "count": 1, "outcome": _OUTCOME}).encode())
    sock.sendall(b"\n")


def another_secret(sock: socket.socket, chance: random.Random) -> None:
    """Answer with a proof of another secret."""
    opening = _line(sock)
    sock.sendall(NodeHandshake(chance.randbytes(32).hex()).reply(opening).encode() + b"\n")


def replayed(sock: socket.socket, _chance: random.Random) -> None:
    """Answer with a proof that was right in another conversation."""
    _line(sock)
    elsewhere = CoordinatorHandshake(SECRET).opening
    sock.sendall(NodeHandshake(SECRET).reply(elsewhere).encode() + b"\n")


def reflected(sock: socket.socket, _chance: random.Random) -> None:
    """Answer with the coordinator's own words."""
    opening = _line(sock).encode()
    sock.sendall(opening + b"\n" + opening.split()[-1] + b" " + opening.split()[-1] * 2 + b"\n")


def cut(sock: socket.socket, chance: random.Random) -> None:
    """Send half of an answer, and wait."""
    answer = NodeHandshake("cd" * 32).reply(_line(sock)).encode()
    sock.sendall(answer[: chance.randrange(1, len(answer))])


def slow(sock: socket.socket, chance: random.Random) -> None:
    """Send a byte now and then."""
    with suppress(OSError):
        for _ in range(5):
            sock.sendall(chance.randbytes(1))
            time.sleep(0.02)


def flood(sock: socket.socket, _chance: random.Random) -> None:
    """Send 7 MB without an end of line."""
    sock.settimeout(2)
    with suppress(OSError):
        sock.sendall(b"a" * 7_000_000)


def reset(sock: socket.socket, _chance: random.Random) -> None:
    """End the connection the rude way."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    sock.close()


KINDS: tuple[Stranger, ...] = (
    *(nothing, noise, http, tls, nested, message, another_secret),
    *(replayed, reflected, cut, slow, flood, reset),
)


def _line(sock: socket.socket) -> str:
    sock.settimeout(5)
    return sock.makefile("rb").readline(300).decode().strip()


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: 1 to 8 strangers of random kinds, before the node comes and while the run goes on."""
    for number in range(count or COUNT):
        kinds = [KINDS[number % len(KINDS)], *chance.choices(KINDS, k=chance.choice([0, 0, 1, 7]))]
        seed = chance.random()
        name = f"{number}: {', '.join(kind.__name__ for kind in kinds)}"
        yield Case(name=name, attack=lambda kinds=kinds, seed=seed: meet_strangers(kinds, random.Random(seed)))


def meet_strangers(kinds: list[Stranger], chance: random.Random) -> None:
    """Let strangers come before a run and during it; raise when the run does not end well, or memory grows."""
    tracemalloc.start()  # not the process's own size, which has what it maps of files for the first time
    place = Place(2)
    acted: list[str] = []
    place.coordinator.actions = RunActions(
        stop=lambda *_: acted.append("stop"),
        end=lambda _: acted.append("end"),
        change=lambda: acted.append("change"),
    )
    open_ones = [_come(place.port, kind, chance) for kind in kinds]
    joined = place.come(1)
    try:
        assignment = place.coordinator.gather(counter())
        joined.join(10)
        if not isinstance(assignment, RunAssignment) or assignment.world != 2:
            msg = f"another run than two nodes': {assignment}"
            raise AssertionError(msg)
        place.coordinator.start()
        (node,) = place.ends
        node.start()
        open_ones += [_come(place.port, kind, chance) for kind in kinds]
        ends: list[int] = []
        ending = threading.Thread(target=lambda: ends.append(node.conclude(_OUTCOME)["status"]), daemon=True)
        ending.start()
        ends.append(place.coordinator.conclude(_OUTCOME)["status"])
        ending.join(10)
        if ends != [0, 0] or acted:
            msg = f"ended with {ends}, after {acted}"
            raise AssertionError(msg)
        if (grown := tracemalloc.get_traced_memory()[1]) > MOST_BYTES:
            msg = f"memory grew by {grown / 1e6:.0f} MB"
            raise AssertionError(msg)
    finally:
        tracemalloc.stop()
        for sock in open_ones:
            sock.close()
        place.close()


def _come(port: int, kind: Stranger, chance: random.Random) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=5)

    def act() -> None:
        with suppress(OSError, ValueError, IndexError):
            kind(sock, chance)

    threading.Thread(target=act, daemon=True).start()
    return sock
