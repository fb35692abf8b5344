"""Machine 0's connections: who has come, what they say, and what they are told. One thread at a time owns them."""

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdplaunch.launch.coordination.interfaces import WakeUp
from fsdplaunch.launch.coordination.node_info import NodeInfo
from fsdplaunch.launch.coordination.protocol import Connection, Message, ProtocolError

TURN_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class NodeConnection:
    """A machine that has arrived; machine 0's own has no connection.

    Attributes:
        came_to: The address of ours that it came to.
        heard: When it last said something, on the monotonic clock.
        offset_ns: What to add to its clock to get ours.
        reached: The machines it could not reach, once it has tried.
        outcome: How its part ended.
        lost: It has gone without a word.
    """

    connection: Connection | None
    came_from: str = ""
    came_to: str = ""
    heard: float = field(default_factory=time.monotonic)
    node_info: NodeInfo | None = None
    rank: int = -1
    offset_ns: int = 0
    reached: list[str] | None = None
    outcome: dict[str, Any] | None = None
    lost: bool = False

    @property
    def name(self) -> str:
        """How people know the machine."""
        return self.node_info.name if self.node_info else self.came_from


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequirements:
    """What machine 0 asks of a meeting.

    Attributes:
        run_id: The run's name.
        least: Machines the run needs.
        most: Machines it may have.
        seconds: How long to wait for them.
        last_call: How long to wait for more once the least are here.
        silence: Seconds without a word after which a machine counts as lost.
        grace: Seconds workers get to end.
        store_port: Where torch's store will listen on this machine.
        expected: The machines' names by number, where a scheduler or a list said them.
        address_said: This machine's address is not the one the others come to, but one that was configured.
    """

    run_id: str
    least: int
    most: int
    seconds: float
    last_call: float = 10.0
    silence: float = 10.0
    grace: float = 30.0
    store_port: int
    expected: Sequence[str] = ()
    address_said: bool = False


class CoordinatorServer:
    """Takes machines in and carries messages; what they mean is for `take` to say."""

    def __init__(self, listener: socket.socket, node_info: NodeInfo, requirements: JoinRequirements) -> None:
        listener.setblocking(False)
        self.requirements = requirements
        self._listener = listener
        self._own = NodeConnection(connection=None, node_info=node_info)
        self._nodes = [self._own]
        self._mail = WakeUp()
        self._running = False

    def take(self, node: NodeConnection, message: Message) -> None:
        """Deal with a message; a KeyError, TypeError or ValueError shows that a stranger sent it."""
        raise NotImplementedError

    @property
    def _present(self) -> list[NodeConnection]:
        return [node for node in self._nodes if node.node_info is not None and not node.lost]

    @property
    def _node_infos(self) -> list[NodeInfo]:
        return [node.node_info for node in self._present if node.node_info is not None]

    def _turn(self, seconds: float = TURN_SECONDS) -> None:
        """Wait for something to happen on any connection, and deal with it."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            selector.register(self._mail.reader, selectors.EVENT_READ, None)
            for node in self._nodes:
                if node.connection is not None and node.connection.open:
                    selector.register(node.connection.sock, node.connection.wants, node)
            for entry, events in selector.select(seconds):
                if entry.fileobj is self._listener:
                    self._accept()
                elif entry.data is not None:
                    self._serve(entry.data, events)
        for action in self._mail.collect():
            action()
        if not self._running:  # who leaves before the run starts may come again
            self._nodes = [node for node in self._nodes if node.connection is None or node.connection.open]

    def _accept(self) -> None:
        try:
            sock, place = self._listener.accept()
        except OSError:
            return
        came_from, came_to = (str(end[0]).removeprefix("::ffff:") for end in (place, sock.getsockname()))
        self._nodes.append(NodeConnection(connection=Connection(sock), came_from=came_from, came_to=came_to))

    def _serve(self, node: NodeConnection, events: int) -> None:
        connection = node.connection
        if connection is None:
            return
        if events & selectors.EVENT_WRITE:
            connection.flush()
        if events & selectors.EVENT_READ:
            try:
                messages = connection.receive()
                for message in messages:
                    node.heard = time.monotonic()
                    self.take(node, message)
            except (ProtocolError, TypeError, KeyError, ValueError, AttributeError):
                connection.close()  # a port scanner, or a torch store that looks for its own

    def _broadcast(self, **message: Any) -> None:
        for node in self._present:
            if node.connection is not None:
                node.connection.send(**message)

    def _flush(self, seconds: float = 2.0) -> None:
        """Send what waits before the process goes on."""
        end = time.monotonic() + seconds
        waiting = [node.connection for node in self._nodes if node.connection is not None]
        while time.monotonic() < end:
            waiting = [one for one in waiting if one.open and one.wants & selectors.EVENT_WRITE]
            if not waiting:
                return
            for one in waiting:
                one.flush()
            time.sleep(0.01)

    def _shut(self) -> None:
        self._listener.close()
        for node in self._nodes:
            if node.connection is not None:
                node.connection.close()
