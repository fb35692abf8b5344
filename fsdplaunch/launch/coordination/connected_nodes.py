"""Which connections the coordinator has, and which of them are nodes of the run.

Kept so that no message makes it look at all of them: with a thousand nodes, as many messages would be a million
looks. What changes is noted when it changes.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from fsdplaunch.launch.coordination.handshake import CoordinatorHandshake
from fsdplaunch.launch.coordination.node_info import NodeInfo
from fsdplaunch.launch.coordination.protocol import Connection, encode


@dataclass(slots=True, eq=False)
class NodeConnection:
    """A node that has connected; the coordinator's own has no connection.

    Attributes:
        handshake: Ours with it, until it has proven to belong to the run.
        came_to: The address of ours that it connected to.
        since: When it connected, on the monotonic clock.
        heard: When its last message came, on the monotonic clock.
        offset_ns: What to add to its clock to get ours.
        reached: The nodes it could not reach, once it has tried.
        outcome: How its workers ended.
        lost: It has gone without reporting an outcome.
    """

    connection: Connection | None
    handshake: CoordinatorHandshake | None = None
    came_from: str = ""
    came_to: str = ""
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    node_info: NodeInfo | None = None
    rank: int = -1
    offset_ns: int = 0
    reached: list[str] | None = None
    outcome: dict[str, Any] | None = None
    lost: bool = False

    @property
    def name(self) -> str:
        """Return how people know the node."""
        return self.node_info.name if self.node_info else self.came_from

    def send(self, **message: Any) -> None:
        """Send a message; nothing happens for the coordinator's own node."""
        self.send_line(encode(message))

    def send_line(self, line: str) -> None:
        """Send what `encode` made of a message."""
        if self.connection is not None:
            self.connection.send_line(line)

    def close(self) -> None:
        """Close the connection, where there is one."""
        if self.connection is not None:
            self.connection.close()

    @property
    def is_closed(self) -> bool:
        """Return whether its connection has ended."""
        return self.connection is not None and not self.connection.open


class ConnectedNodes:
    """The coordinator's connections, in order of arrival, or of rank."""

    def __init__(self, own: NodeConnection) -> None:
        """Begin with the coordinator's own node, which is always present."""
        self._all = {own: None}
        self._present = {own: None}
        self._unproven: dict[NodeConnection, None] = {}
        self._awaited: OrderedDict[NodeConnection, None] = OrderedDict()

    def __iter__(self) -> Iterator[NodeConnection]:
        """Go through all connections."""
        return iter(list(self._all))

    def __len__(self) -> int:
        """Return how many connections there are."""
        return len(self._all)

    @property
    def present(self) -> list[NodeConnection]:
        """Return the nodes that have presented themselves and are not lost."""
        return list(self._present)

    @property
    def number_present(self) -> int:
        """Return how many nodes are present."""
        return len(self._present)

    @property
    def number_awaited(self) -> int:
        """Return how many nodes have yet to say how they ended; the coordinator's own is not among them."""
        return len(self._awaited)

    def add(self, node: NodeConnection) -> None:
        """Add a connection that has yet to prove that it belongs to the run."""
        self._all[node] = self._unproven[node] = None

    def accept(self, node: NodeConnection) -> None:
        """Note that a connection belongs to the run."""
        node.handshake = None
        self._unproven.pop(node, None)

    def introduce(self, node: NodeConnection, node_info: NodeInfo) -> None:
        """Note which node a connection is."""
        node.node_info, node.heard = node_info, time.monotonic()
        self._present[node] = self._awaited[node] = None

    def turn_away(self, node: NodeConnection) -> None:
        """Note that what has presented itself is no node of the run."""
        node.node_info = None
        self._leave(node)

    def lose(self, node: NodeConnection) -> None:
        """Note that a node has gone for good; what is known of it stays."""
        node.lost = True
        self._leave(node)
        node.close()

    def remove(self, node: NodeConnection) -> None:
        """Forget a connection that has ended, as if it had never been."""
        self._all.pop(node, None)
        self._unproven.pop(node, None)
        self._leave(node)

    def _leave(self, node: NodeConnection) -> None:
        self._present.pop(node, None)
        self._awaited.pop(node, None)

    def order(self) -> None:
        """Have the lowest rank come first from now on."""
        for nodes in (self._all, self._present):
            for node in sorted(nodes, key=lambda one: one.rank):
                nodes[node] = nodes.pop(node)

    def hear(self, node: NodeConnection) -> None:
        """Note that a message has come."""
        node.heard = time.monotonic()
        if node in self._awaited:
            self._awaited.move_to_end(node)

    def hear_all(self) -> None:
        """Count silence from now on."""
        for node in list(self._awaited):
            self.hear(node)

    def finish(self, node: NodeConnection, outcome: dict[str, Any]) -> None:
        """Note how a node's workers ended; it may be silent from now on."""
        node.outcome = outcome
        self._awaited.pop(node, None)

    def silent_since(self, when: float) -> list[NodeConnection]:
        """Return the awaited nodes that have said nothing since a time on the monotonic clock."""
        return list(takewhile(lambda node: node.heard < when, self._awaited))

    def unproven_since(self, when: float, *, most: int) -> list[NodeConnection]:
        """Return the connections that have proven nothing since a time, and the oldest of more than `most`."""
        late = list(takewhile(lambda node: node.since < when, self._unproven))
        return list(islice(self._unproven, max(len(late), len(self._unproven) - most)))
