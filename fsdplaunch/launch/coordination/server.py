"""The coordinator's connections: which nodes have come, what they send and get. One thread owns them."""

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdplaunch.launch.coordination.network import plain_address
from fsdplaunch.launch.coordination.node_info import NodeInfo
from fsdplaunch.launch.coordination.protocol import (
    NONE,
    TO_COORDINATOR,
    Connection,
    CoordinatorHandshake,
    Message,
    WakeUp,
    encode,
)

TURN_SECONDS = 0.5
_PROOF_SECONDS = 5.0
"""How long a connection may take to prove that it belongs to the run."""
UNPROVEN = 256
"""How many connections may be about to prove it; of more, the oldest goes."""
_ACCEPTED_AT_ONCE = 256
_MANY, _PAUSE_SECONDS = 64, 0.005
"""With so many nodes a turn handles all that comes within so many seconds."""
_TURNED_AWAY_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequirements:
    """What the coordinator requires of the nodes that join.

    Attributes:
        run_id: The run's name.
        least: Nodes the run needs.
        most: Nodes it may have.
        seconds: How long to wait for them.
        last_call: How long to wait for more once the least are here.
        silence: Seconds without a message after which a node counts as lost.
        grace: Seconds workers get to end.
        expected: The nodes' names by rank, where a scheduler or a list names them.
        address_is_set: This node's address was configured, and is not taken from where the others connected to.
        secret: What every connection has to know.
    """

    run_id: str
    least: int
    most: int
    seconds: float
    last_call: float = 10.0
    silence: float = 10.0
    grace: float = 30.0
    expected: Sequence[str] = ()
    address_is_set: bool = False
    secret: str = field(repr=False)


@dataclass(slots=True, eq=False)
class NodeConnection:
    """A node that has connected; the coordinator's own has no connection.

    Attributes:
        handshake: Ours with it, until it has proven to belong to the run.
        came_to: The address of ours that it connected to.
        since: When it connected, on the monotonic clock.
        heard: When its last message came, on the monotonic clock.
        node_info: What it said of itself, once it has.
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


class CoordinatorServer:
    """Accepts nodes and carries messages; what a message means is up to `take`.

    Attributes:
        own: The coordinator's own node.
        connections: All there are, in order of arrival, its own first.
        is_complete: All nodes are here that the run begins with.
        running: The run has begun.
    """

    def __init__(
        self,
        listener: socket.socket,
        node_info: NodeInfo,
        requirements: JoinRequirements,
        take: Callable[[NodeConnection, Message], None],
        tell: Callable[[str], None],
    ) -> None:
        """Listen.

        Args:
            listener: The socket that nodes connect to.
            node_info: The coordinator's own node.
            requirements: What it requires of the others.
            take: Handles a message. Whatever it raises ends that connection, and nothing else.
            tell: Shows who came without the secret.
        """
        listener.setblocking(False)
        self.requirements = requirements
        self.own = NodeConnection(connection=None, node_info=node_info)
        self.connections = [self.own]
        self.is_complete = self.running = False
        self.store_port = 0
        self.mail = WakeUp()
        self._listener = listener
        self._take, self._tell = take, tell
        self._turned_away: set[str] = set()
        self._ended: list[NodeConnection] = []
        self._late: list[tuple[NodeConnection, NodeInfo]] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, listener)
        self._selector.register(self.mail.reader, selectors.EVENT_READ, self.mail)

    @property
    def port(self) -> int:
        """Return the port that nodes connect to."""
        return int(self._listener.getsockname()[1])

    @property
    def present(self) -> list[NodeConnection]:
        """Return the nodes that have presented themselves and are not lost."""
        return [node for node in self.connections if node.node_info is not None and not node.lost]

    @property
    def node_infos(self) -> list[NodeInfo]:
        """Return how the present nodes present themselves."""
        return [node.node_info for node in self.present if node.node_info is not None]

    @property
    def awaited(self) -> list[NodeConnection]:
        """Return the nodes that have yet to say how they ended; the coordinator's own is not among them."""
        return [node for node in self.present if node.outcome is None and node is not self.own]

    def let_in(self, node: NodeConnection, node_info: NodeInfo) -> None:
        """Take a node in before the run starts; once all are there, it waits for the run to have started."""
        if self.is_complete or len(self.present) >= self.requirements.most:
            self._late.append((node, node_info))
        else:
            node.node_info = node_info

    def take_late(self) -> list[tuple[NodeConnection, NodeInfo]]:
        """Return the nodes that came when all were there, and are still waiting; nobody waits any more."""
        late, self._late = self._late, []
        return [(node, node_info) for node, node_info in late if not node.is_closed]

    def turn(self, seconds: float = TURN_SECONDS) -> list[NodeConnection]:
        """Wait for something to happen on any connection, and handle it; return those that did it."""
        served = []
        if len(self.connections) > _MANY:
            time.sleep(_PAUSE_SECONDS)  # what comes meanwhile is one turn's work, and not as many turns'
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, NodeConnection):
                self._serve(key.data)
                served.append(key.data)
            elif key.data is self._listener:
                self._accept()
        for action in self.mail.collect():
            action()
        return served + self._forget()

    def _forget(self) -> list[NodeConnection]:
        """Forget connections that have ended, which are returned, and close those that prove nothing in time."""
        ended, self._ended = self._ended, []
        # Who leaves before the run starts may come again; who has never been a node leaves nothing.
        gone = {node for node in ended if not self.running or node.node_info is None}
        if gone:
            self.connections = [node for node in self.connections if node not in gone]
        unproven = [node for node in self.connections if node.handshake is not None]
        too_many = len(unproven) - max(UNPROVEN, self.requirements.most)
        late = time.monotonic() - _PROOF_SECONDS
        for place, node in enumerate(unproven):
            if place < too_many or node.since < late:
                node.close()
        return ended

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, place = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # too many open files: it waits
                time.sleep(0.01)
                return
            self._welcome(sock, plain_address(place))

    def _welcome(self, sock: socket.socket, came_from: str) -> None:
        handshake = CoordinatorHandshake(self.requirements.secret)
        try:
            came_to = plain_address(sock.getsockname())
            connection = Connection(sock, TO_COORDINATOR)
        except OSError:  # it has gone
            sock.close()
            return
        node = NodeConnection(connection=connection, handshake=handshake, came_from=came_from, came_to=came_to)
        self.connections.append(node)
        connection.watch(self._selector, node, lambda: self._ended.append(node))
        connection.send_line(handshake.opening)

    def _serve(self, node: NodeConnection) -> None:
        """Handle what a connection has sent; whatever is wrong with it ends this connection alone."""
        connection = node.connection
        if connection is None or not connection.open:  # ended by what another one has sent in this turn
            return
        try:
            connection.flush()
            if node.handshake is not None and not self._is_proven(node, connection, node.handshake):
                return
            for message in connection.receive():
                node.heard = time.monotonic()
                self._take(node, message)
        except Exception:  # a port scanner, or a node that has lost its mind: nobody else is to suffer
            connection.close()

    def _is_proven(self, node: NodeConnection, connection: Connection, handshake: CoordinatorHandshake) -> bool:
        """Return whether a connection belongs to the run, as far as it has said."""
        line = connection.receive_line()
        if line is None:
            return False
        accepted, answer = handshake.answer(line)
        if not accepted:
            self._mention(node.came_from, "without a secret" if line == NONE else "with another secret")
        connection.send_line(answer)
        if accepted:
            node.handshake = None
            connection.trust()
        else:
            connection.close()
        return accepted

    def _mention(self, address: str, which: str) -> None:
        if address not in self._turned_away and len(self._turned_away) < _TURNED_AWAY_SHOWN:
            self._turned_away.add(address)
            self._tell(f"{address} came {which}, and was turned away: it does not belong to this run")

    def broadcast(self, *, but: NodeConnection | None = None, **message: Any) -> None:
        """Send a message to every present node, or to all but one."""
        line = encode(message)
        for node in self.present:
            if node is not but:
                node.send_line(line)

    def flush(self, seconds: float = 2.0) -> None:
        """Send what waits before the process goes on."""
        end = time.monotonic() + seconds
        waiting = [node.connection for node in self.connections if node.connection is not None]
        while time.monotonic() < end:
            waiting = [one for one in waiting if one.open and one.wants & selectors.EVENT_WRITE]
            if not waiting:
                return
            for one in waiting:
                one.flush()
            time.sleep(0.01)

    def shut(self) -> None:
        """Close every connection and the listener."""
        for node in self.connections:
            node.close()
        self._selector.close()
        self._listener.close()
