"""The coordinator's connections: which nodes have come, what they send and get. One thread owns them."""

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdplaunch.launch.coordination.network import plain_address
from fsdplaunch.launch.coordination.node_info import NodeInfo
from fsdplaunch.launch.coordination.protocol import (
    MAX_BYTES,
    NONE,
    TO_COORDINATOR,
    Connection,
    CoordinatorHandshake,
    Loop,
    Message,
    decode,
    text_of_line,
)

TURN_SECONDS = 0.5
_PROOF_SECONDS = 5.0
"""How long a connection may take to prove that it belongs to the run."""
UNPROVEN = 256
"""How many connections may be about to prove it; of more, the oldest goes."""
_BACKLOG = 4096
_MANY, _PAUSE_SECONDS = 64, 0.005
"""With so many nodes a turn handles all that comes within so many seconds."""
_TURNED_AWAY_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequirements:
    """What the coordinator requires of the nodes that join."""

    run_id: str
    least: int  # nodes the run needs
    most: int  # nodes it may have
    seconds: float  # how long to wait for the least
    last_call: float = 10.0  # how long to wait for more after that
    silence: float = 10.0  # seconds without a message after which a node counts as lost
    grace: float = 30.0  # seconds workers get to end
    expected: Sequence[str] = ()  # the nodes' names by rank, where a scheduler or a list names them
    # This node's address was configured, and is not taken from where the others connected to.
    address_is_set: bool = False
    secret: str = field(repr=False)


@dataclass(slots=True, eq=False)
class NodeConnection:
    """A node that has connected; the coordinator's own has no connection."""

    connection: Connection | None
    handshake: CoordinatorHandshake | None = None  # ours with it, until it has proven to belong to the run
    came_from: str = ""
    came_to: str = ""  # the address of ours that it connected to
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    node_info: NodeInfo | None = None  # what it said of itself, once it has
    rank: int = -1
    offset_ns: int = 0  # what to add to its clock to get ours
    reached: str | None = None  # why it could not reach the next node, once it has tried; empty where it could
    outcome: dict[str, Any] | None = None  # how its workers ended
    lost: bool = False  # it has gone without reporting an outcome

    @property
    def name(self) -> str:
        """Return how people know the node."""
        return self.node_info.name if self.node_info else self.came_from

    def send(self, **message: Any) -> None:
        """Send a message; nothing happens for the coordinator's own node."""
        if self.connection is not None:
            self.connection.send(**message)

    def close(self) -> None:
        """Close the connection, where there is one."""
        if self.connection is not None:
            self.connection.close()

    @property
    def is_closed(self) -> bool:
        """Return whether its connection has ended."""
        return self.connection is not None and not self.connection.open


class CoordinatorServer:
    """Accepts nodes and carries messages; what a message means is up to `take`.

    Attributes:
        own: The coordinator's own node.
        connections: All there are, in order of arrival, its own first.
        running: The run has begun.
        loop: Carries the messages; other threads have it do something.
    """

    def __init__(
        self,
        listener: socket.socket,
        node_info: NodeInfo,
        requirements: JoinRequirements,
        take: Callable[[NodeConnection, Message], None],
        tell: Callable[[str], None],
    ) -> None:
        """Listen; whatever `take` raises for a message ends that connection, and nothing else."""
        self.requirements = requirements
        self.own = NodeConnection(connection=None, node_info=node_info)
        self.connections = [self.own]
        self.running = False
        self.loop = Loop()
        self._take, self._tell = take, tell
        self._turned_away: set[str] = set()
        self._served: list[NodeConnection] = []
        self._nodes: dict[Connection, NodeConnection] = {}
        self.port = int(listener.getsockname()[1])
        made = self.loop.asyncio.create_server(lambda: Connection(self._changed), sock=listener, backlog=_BACKLOG)
        self._listening = self.loop.asyncio.run_until_complete(made)

    @property
    def present(self) -> list[NodeConnection]:
        """Return the nodes that have presented themselves and are not lost."""
        return [node for node in self.connections if node.node_info is not None and not node.lost]

    @property
    def by_rank(self) -> list[NodeConnection]:
        """Return the present nodes in the order of their ranks."""
        return sorted(self.present, key=lambda node: node.rank)

    @property
    def node_infos(self) -> list[NodeInfo]:
        """Return how the present nodes present themselves."""
        return [node.node_info for node in self.present if node.node_info is not None]

    @property
    def awaited(self) -> list[NodeConnection]:
        """Return the nodes that have yet to say how they ended; the coordinator's own is not among them."""
        return [node for node in self.present if node.outcome is None and node is not self.own]

    def turn(self, seconds: float = TURN_SECONDS) -> list[NodeConnection]:
        """Wait for something to happen on any connection, and handle it; return those that did it."""
        if len(self.connections) > _MANY:
            time.sleep(_PAUSE_SECONDS)  # what comes meanwhile is one turn's work, and not as many turns'
        self.loop.turn(seconds)
        served, self._served = self._served, []
        if any(node.is_closed for node in served):
            # Who leaves before the run starts may come again; who has never been a node leaves nothing.
            self.connections = [
                node
                for node in self.connections
                if not node.is_closed or (self.running and node.node_info is not None)
            ]
        # Who proves nothing in time has to go, and the oldest of too many.
        unproven = [node for node in self.connections if node.handshake is not None]
        too_many = len(unproven) - max(UNPROVEN, self.requirements.most)
        late = time.monotonic() - _PROOF_SECONDS
        for place, node in enumerate(unproven):
            if place < too_many or node.since < late:
                node.close()
        return served

    def _changed(self, connection: Connection) -> None:
        """Handle what a connection does; whatever is wrong with it ends this connection alone."""
        node = self._nodes.get(connection)
        if node is None:  # it has just come
            ends = [connection.transport.get_extra_info(name) or ("",) for name in ("peername", "sockname")]
            came_from, came_to = map(plain_address, ends)
            handshake = CoordinatorHandshake(self.requirements.secret)
            node = NodeConnection(connection=connection, handshake=handshake, came_from=came_from, came_to=came_to)
            self._nodes[connection] = node
            self.connections.append(node)
            connection.send_line(handshake.opening)
        try:
            while connection.lines and connection.open:
                self._serve(node, connection, connection.lines.popleft())
        except Exception:  # a port scanner, or a node that has lost its mind: nobody else is to suffer
            connection.close()
        if not connection.open:
            self._nodes.pop(connection, None)
        self._served.append(node)
        self.loop.notice()

    def _serve(self, node: NodeConnection, connection: Connection, line: bytes) -> None:
        node.heard = time.monotonic()
        if node.handshake is None:
            self._take(node, decode(line, TO_COORDINATOR))
            return
        text, address = text_of_line(line), node.came_from
        accepted, answer = node.handshake.answer(text)
        if not accepted and address not in self._turned_away and len(self._turned_away) < _TURNED_AWAY_SHOWN:
            self._turned_away.add(address)
            which = "without a secret" if text == NONE else "with another secret"
            self._tell(f"{address} came {which}, and was turned away: it does not belong to this run")
        connection.send_line(answer)
        if accepted:
            node.handshake, connection.limit = None, MAX_BYTES
        else:
            connection.close()

    def broadcast(self, *, but: NodeConnection | None = None, **message: Any) -> None:
        """Send a message to every present node, or to all but one."""
        line = json.dumps(message)
        for node in self.present:
            if node is not but and node.connection is not None:
                node.connection.send_line(line)

    def flush(self) -> None:
        """Send what waits before the process goes on."""
        self.loop.flush([node.connection for node in self.connections if node.connection is not None])

    def shut(self) -> None:
        """Close every connection and the listener."""
        for node in self.connections:
            node.close()
        self._listening.close()
        self.loop.close()
