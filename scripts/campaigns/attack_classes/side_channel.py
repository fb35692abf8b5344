"""Strangers at the socket by which rank 0 asks the other ranks: a run has the results that it has without them.

The socket listens only while ranks connect, so one rank comes late. Meanwhile strangers come: they say nothing,
send noise, half a greeting, one of another run, or what rank 0 sends, and hold connections by the hundred. Whole
runs, whose rank 0 saves alone; and the accepting function by itself, with strangers who know the secret and say
that they are rank 0, one that there is not, or one that has come already.
"""

import asyncio
import hashlib
import random
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.runs import ROOT, Run, end_all, launch
from scripts.campaigns.attack_classes.stores import descendants, listening

COUNT = 48
WHOLE_RUNS = 8
_LATE_SECONDS = 4.0
_RUN_SECONDS = 90.0
_SECRET_BYTES = 32
_SCRIPT = f"""
import os, socket, sys, time
import torch
rank = os.environ["RANK"]
if rank == "1":  # it comes late to the socket of rank 0, and to no other
    connect = socket.create_connection
    def late(*args, **named):
        os.close(os.open("late", os.O_CREAT))  # not by `open`: what this rank writes is rank 0's to write
        time.sleep({_LATE_SECONDS})
        return connect(*args, **named)
    socket.create_connection = late
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == "0":
        torch.save(model.state_dict(), f"{{step}}.pt")
"""
Stranger = Callable[[socket.socket, random.Random], None]


def silent(_sock: socket.socket, _chance: random.Random) -> None:
    """Connect, say nothing, and stay."""


def noise(sock: socket.socket, chance: random.Random) -> None:
    """Send random bytes, fewer than a greeting, as many, or more."""
    sock.sendall(chance.randbytes(chance.choice([1, 35, 36, 37, 5000, 2_000_000])))


def half(sock: socket.socket, chance: random.Random) -> None:
    """Send a greeting byte by byte, and never the end."""
    for _ in range(30):
        sock.sendall(chance.randbytes(1))
        time.sleep(0.02)


def another_run(sock: socket.socket, chance: random.Random) -> None:
    """Greet as rank 1 of another run would."""
    sock.sendall(chance.randbytes(_SECRET_BYTES) + (1).to_bytes(4, "big"))


def as_rank_0(sock: socket.socket, chance: random.Random) -> None:
    """Greet, and send what rank 0 sends: a request, with its length before it, and one that is endless."""
    request = b'{"kind": "end"}'
    sock.sendall(chance.randbytes(36) + len(request).to_bytes(8, "big") + request)
    sock.sendall((2**63).to_bytes(8, "big") + b"x" * 4096)


def reset(sock: socket.socket, chance: random.Random) -> None:
    """Send a little, and end the connection the rude way."""
    sock.sendall(chance.randbytes(8))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    sock.close()


KINDS: tuple[Stranger, ...] = (silent, noise, half, another_run, as_rank_0, reset)


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: whole runs, and the accepting function with those who know the secret."""
    for number in range(count or COUNT):
        seed = chance.random()
        if number < WHOLE_RUNS:
            title = f"{number}: strangers at a run whose rank 1 is late"
            yield Case(name=title, attack=lambda seed=seed: visit_run(random.Random(seed)))
        else:
            ranks, others = chance.choice([2, 3, 5]), chance.choice([1, 8, 60, 400])
            title = f"{number}: {others} strangers before {ranks - 1} ranks"
            yield Case(
                name=title,
                attack=lambda seed=seed, ranks=ranks, others=others: visit(random.Random(seed), ranks, others),
            )


def visit_run(chance: random.Random) -> None:
    """Come to every socket of a run while rank 1 is awaited; raise when its files differ, or it ends ill."""
    with tempfile.TemporaryDirectory() as base:
        results = []
        for name, is_visited in (("alone", False), ("visited", True)):
            folder = Path(base, name)
            folder.mkdir()
            options = ("--num-processes", "2", "--fsdp-auto-wrap-policy", "NO_WRAP")
            run = launch(folder, _SCRIPT, *options, PYTHONPATH=str(ROOT))
            count = _visit_all(folder, run, chance) if is_visited else 0
            (said,) = end_all([run], _RUN_SECONDS)
            assert run.returncode == 0, f"ended with {run.returncode}: {said[-2500:]}"
            assert count or not is_visited, "nobody was let in: the case has not reached what it is about"
            files = sorted(folder.glob("*.pt"))
            results.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files})
        assert results[0] == results[1], results
        assert len(results[0]) == 4, results


def _visit_all(folder: Path, run: "Run[str]", chance: random.Random) -> int:
    """Come to what listens for the first time while rank 1 is late; return how often that was let in."""
    end, visited, sockets = time.monotonic() + 60, 0, []
    while not (folder / "late").exists() and run.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    end = time.monotonic() + _LATE_SECONDS - 1
    places = listening(descendants(run.pid))
    assert not [place for place in places if not place.startswith("127.")], places
    while time.monotonic() < end and len(sockets) < 400:
        for place in places:
            with suppress(OSError):
                sock = socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])), timeout=0.5)
                sockets.append(sock)
                visited += 1
                threading.Thread(target=_act, args=(chance.choice(KINDS), sock, chance), daemon=True).start()
    return visited


def _act(kind: Stranger, sock: socket.socket, chance: random.Random) -> None:
    with suppress(OSError):
        kind(sock, chance)


def visit(chance: random.Random, ranks: int, others: int) -> None:
    """Have strangers and ranks come to the accepting function in one crowd; raise when a rank is not let in."""
    from fsdplaunch.runtime.auto.rank0.side_channel import accept, greeting
    from fsdplaunch.sockets import bound
    from fsdplaunch.sockets import listening as listen

    secret, sock = secrets.token_bytes(_SECRET_BYTES), bound("127.0.0.1", 0)
    port = listen(sock)[1]
    found: list[list[tuple[int, socket.socket]]] = []
    rank_0 = threading.Thread(target=lambda: found.append(asyncio.run(accept(sock, ranks, secret))), daemon=True)
    rank_0.start()
    liars = (lambda s, _: s.sendall(greeting(secret, 0)), lambda s, _: s.sendall(greeting(secret, 99)))
    sockets = []
    for _ in range(others):
        with suppress(OSError):
            sockets.append(stranger := socket.create_connection(("127.0.0.1", port), timeout=5))
            kind = chance.choice([*KINDS, *liars])
            threading.Thread(target=_act, args=(kind, stranger, chance), daemon=True).start()
    members = {}
    for rank in range(1, ranks):
        members[rank] = socket.create_connection(("127.0.0.1", port), timeout=5)
        members[rank].sendall(greeting(secret, rank))
        with suppress(OSError):  # a second one of the same rank, which the first is not to lose its place to
            sockets.append(again := socket.create_connection(("127.0.0.1", port), timeout=5))
            again.sendall(greeting(secret, rank)[: chance.choice([10, 36])])
    rank_0.join(20)
    assert found, "not all ranks were let in"
    assert [rank for rank, _ in found[0]] == list(range(1, ranks)), found
    for rank, stream in found[0]:
        stream.sendall(f"to {rank}".encode())
    said = {rank: member.recv(10).decode() for rank, member in members.items()}
    for each in (*sockets, *members.values(), *(stream for _, stream in found[0])):
        each.close()
    assert said == {rank: f"to {rank}" for rank in members}, said
    with suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        raise AssertionError("it still listens")
