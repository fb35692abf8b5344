"""What the protection of a run costs its start: the secret, the handshake, a folder. For `rendezvous`."""

import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fsdplaunch.launch.coordination.join import SecretSource
from fsdplaunch.launch.coordination.protocol import CoordinatorHandshake, NodeHandshake
from fsdplaunch.private_dir import make_private_dir, remove_private_dir

SECRET = "ab" * 32


def protect() -> dict[str, float]:
    """Seconds that the protection of a run costs a start, by what is done; each the best of 20."""
    folder = Path(tempfile.mkdtemp())
    shared = folder / ".join"

    def exchange() -> None:
        source = SecretSource("", shared)
        source.offer()
        SecretSource("", shared).wait()
        source.withdraw()

    def shake() -> None:
        coordinator, node = CoordinatorHandshake(SECRET), NodeHandshake(SECRET)
        accepted, answer = coordinator.answer(node.reply(coordinator.opening))
        if not (accepted and node.is_accepted(answer)):
            raise SystemExit("the handshake failed")

    def hide() -> None:
        environ: dict[str, str] = {}
        make_private_dir(environ)
        remove_private_dir(environ)

    def lines() -> None:
        """Send the handshake's three lines over loopback: what a connection takes longer than without."""
        one, other = socket.socketpair()
        for _ in range(3):
            one.sendall(b"x" * 100)
            other.recv(256)
            one, other = other, one
        one.close()
        other.close()

    actions = {"make the secret, leave it in a file, find it": exchange, "prove it, both sides": shake}
    actions |= {"three lines more on a connection": lines, "a private folder for a lone node": hide}
    try:
        return {name: min(timed(action) for _ in range(20)) for name, action in actions.items()}
    finally:
        shutil.rmtree(folder)


def timed(action: Callable[[], None]) -> float:
    start = time.monotonic()
    action()
    return time.monotonic() - start


def show() -> None:
    """Print the costs, one a line."""
    costs = protect()
    for name, cost in costs.items():
        print(f"{1000 * cost:8.2f} ms  {name}")
    print(f"{1000 * sum(costs.values()):8.2f} ms  in all: what a run's protection costs its start\n", flush=True)
