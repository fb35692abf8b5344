"""A coordinator and its nodes on loopback, as threads: what tests and attacks on joining share."""

import threading
from collections.abc import Callable
from pathlib import Path

from fsdplaunch.errors import MachineError
from fsdplaunch.launch.coordination import network
from fsdplaunch.launch.coordination.coordinator import Coordinator, JoinRequirements
from fsdplaunch.launch.coordination.node_client import NodeClient
from fsdplaunch.launch.coordination.node_info import NodeInfo
from fsdplaunch.launch.coordination.run_control import JoinProgress
from fsdplaunch.launch.coordination.secret_source import SecretSource

SECRET = "ab" * 32
NOWHERE = Path("/nonexistent/.join-x")


def make_client(
    port: int, *, seconds: float, tell: Callable[[str], None] = print, secret: str = SECRET
) -> NodeClient:
    """A node that comes to a port."""
    source = SecretSource(secret, NOWHERE)
    return NodeClient("127.0.0.1", port, secret=source, seconds=seconds, grace=1, tell=tell)


def counter(said: list[str] | None = None) -> JoinProgress:
    return JoinProgress(say=(said if said is not None else []).append, every=0.2)


class Place:
    """A coordinator on a free port, and nodes that come to it."""

    def __init__(self, least: int = 2, most: int | None = None, seconds: float = 10, **more) -> None:
        self.listener = network.listen("127.0.0.1", 0)
        self.port = int(self.listener.getsockname()[1])
        self.told: list[str] = []
        requirements = JoinRequirements(
            run_id="r1",
            least=least,
            most=most or least,
            seconds=seconds,
            last_call=0.3,
            secret=SECRET,
            **more,
        )
        self.coordinator = Coordinator(self.listener, self.node_info(0), requirements, self.told.append)
        self.ends: list[object] = []

    def node_info(self, number: int, **change) -> NodeInfo:
        return NodeInfo(**{"host": f"host{number}", "address": "127.0.0.1", "port": self.port, **change})

    def client(self, secret: str = SECRET) -> NodeClient:
        return make_client(self.port, seconds=10, tell=self.told.append, secret=secret)

    def come(self, number: int, **change) -> threading.Thread:
        def run() -> None:
            client = self.client()
            try:
                client.connect(counter())
                client.join(self.node_info(number, **change), counter())
                self.ends.append(client)
            except MachineError as error:
                self.ends.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Free every port."""
        self.coordinator.close()
        for client in self.ends:
            if isinstance(client, NodeClient):
                client.close()
