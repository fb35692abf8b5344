"""The coordinator, node 0's launcher: who joins, how is every node doing, who stops, how did the run end.

Before the run it waits for the nodes, compares them, has them try each other, and starts them. One thread owns the
connections: the launcher's own until the run starts, then one in the background.
"""

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdplaunch.errors import MachineError
from fsdplaunch.launch.coordination.network import is_loopback, obstacle_to, plain_address, reason
from fsdplaunch.launch.coordination.node_info import NodeInfo, assign_ranks, find_incompatibilities, unreachable
from fsdplaunch.launch.coordination.protocol import (
    MAX_BYTES,
    NONE,
    TO_COORDINATOR,
    Connection,
    CoordinatorHandshake,
    Loop,
    Message,
    ProtocolError,
    decode,
    text_of_line,
)
from fsdplaunch.launch.coordination.run_control import (
    JoinProgress,
    RunAssignment,
    RunControl,
    Tell,
    has_failed,
    merge_outcomes,
)
from fsdplaunch.launch.preflight import Finding
from fsdplaunch.launch.root_cause import WARNINGS, signal_name
from fsdplaunch.sockets import ALL_ADDRESSES, held

_SAID = 8
"""Most findings that are sent to every node."""
_REACH_SECONDS = 15.0
"""How long nodes may take to try each other."""
NEWS_SECONDS = 1.0
"""How often nodes hear how many are here."""
LOOK_SECONDS = 0.1
"""How often to look whether nodes have gone silent."""
LINGER_SECONDS = 15.0
"""How long the others may take, after their grace, to end when one node has failed."""
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


class Coordinator(RunControl):
    """Node 0's launcher, for the others: first they join, then they run.

    Attributes:
        own: This node.
        connections: All there are, in order of arrival, its own first.
        port: Where it listens.
    """

    def __init__(
        self, listener: socket.socket, node_info: NodeInfo, requirements: JoinRequirements, tell: Tell
    ) -> None:
        super().__init__(tell)
        self._requirements = requirements
        self.own = NodeConnection(connection=None, node_info=node_info)
        self.connections = [self.own]
        self._loop = Loop()
        self._running = False
        self._turned_away: set[str] = set()
        self._served: list[NodeConnection] = []
        self._nodes: dict[Connection, NodeConnection] = {}
        self.port = int(listener.getsockname()[1])
        made = self._loop.asyncio.create_server(lambda: Connection(self._changed), sock=listener, backlog=_BACKLOG)
        self._listening = self._loop.asyncio.run_until_complete(made)
        self._is_complete = False
        self._signalled: dict[int, int] = {}
        self._is_stopping = False
        self._changes = 0
        self._losses: list[str] = []
        self._ended = False

    # Before the run, in the launcher's own thread

    def gather(self, progress: JoinProgress) -> RunAssignment:
        """Wait for the nodes, compare them, have them try each other, and start them, or say why not."""
        try:
            self._await_nodes(progress)
        finally:
            progress.end()
        self._is_complete = True
        # The address that the others connected to is one at which the workers can reach this node as well.
        came_to = (node.came_to for node in self.present)
        address = next((one for one in came_to if one and not is_loopback(one)), None)
        if address and self.own.node_info and not self._requirements.address_is_set:
            self.own.node_info = replace(self.own.node_info, address=address)
        found = find_incompatibilities(self.node_infos, most=self._requirements.most)
        if not any(one.fatal for one in found):
            for node, rank in zip(self.present, assign_ranks(self.node_infos), strict=True):
                node.rank = rank
            found += self._try_each_other()
        if fatal := [one for one in found if one.fatal]:
            raise self._refuse(fatal)
        self.assignment = self._start_nodes([one.message for one in found])
        return self.assignment

    def _await_nodes(self, progress: JoinProgress) -> None:
        required = self._requirements
        enough_since, last_news = None, 0.0
        while (here := len(self.present)) < required.most:
            now = time.monotonic()
            enough_since = (enough_since or now) if here >= required.least else None
            if enough_since is not None and now - enough_since > required.last_call:
                return
            if enough_since is None and progress.seconds > required.seconds:
                infos = self.node_infos
                names, taken = ", ".join(one.name for one in infos), set(assign_ranks(infos))
                known = dict(enumerate(required.expected))
                missing = [known.get(rank, f"node {rank}") for rank in range(required.least) if rank not in taken]
                came = f"{len(taken)} of {required.least} nodes joined within {required.seconds:.0f} s: {names}"
                hint = f"start the same command there; can they reach port {self.port} of {self.own.name}?"
                raise self._refuse([Finding(message=f"{came}; missing: {', '.join(missing)}", hint=hint)])
            progress.show(f"{here} of {required.least} nodes have joined")
            if now - last_news > NEWS_SECONDS:
                last_news = now
                self._broadcast(kind="waiting", here=here, of=required.least)
            self._turn()

    def _try_each_other(self) -> list[Finding]:
        own, nodes = self.own, self.by_rank
        infos = [node.node_info for node in nodes if node.node_info is not None]
        others = dict(zip(nodes, [*infos[1:], infos[0]], strict=True))
        for node, other in others.items():
            node.send(kind="try", address=other.address, port=other.port)

        def try_own() -> None:
            own.reached = obstacle_to(others[own].address, others[own].port)

        threading.Thread(target=try_own, daemon=True).start()
        end, waiting = time.monotonic() + _REACH_SECONDS, set(nodes)
        while waiting and time.monotonic() < end:
            changed = [*self._turn(0.05), own]
            waiting.difference_update(node for node in changed if node.reached is not None or node.is_closed)
        present = self.present if len(self.present) >= self._requirements.least else nodes
        return unreachable({node.name: (others[node].name, node.reached) for node in present})

    def _refuse(self, findings: Sequence[Finding]) -> MachineError:
        message = "; ".join(one.message for one in findings[:_SAID])
        if len(findings) > _SAID:
            message += f"; and {len(findings) - _SAID} more"
        hint = findings[0].hint
        self._broadcast(kind="refused", message=message, hint=hint)
        self._flush()
        self._disconnect()
        return MachineError(message, hint=hint)

    def _start_nodes(self, notes: Sequence[str]) -> RunAssignment:
        nodes, own, address = self.by_rank, self.own, self.node_infos[0].address
        came_to = {node.came_to for node in nodes[1:]} or {address}
        store_host = came_to.pop() if len(came_to) == 1 else ALL_ADDRESSES
        try:  # the port that the others are about to be told: a free one, nobody's `main_process_port`
            held_port = held(store_host)
        except OSError as error:
            message = f"torch's store cannot listen at {store_host} on {own.name}: {reason(error)}"
            hint = "is that an address of node 0? set launch.local_address or launch.network_interface there"
            raise self._refuse([Finding(message=message, hint=hint)]) from None
        self._store_port = int(held_port.getsockname()[1])
        run = self._start_message(nodes, notes)
        for place, node in enumerate(nodes[1:], 1):
            node.send(**run, rank=node.rank, place=place)
        self._running = True
        return RunAssignment.from_message(
            {**run, "rank": own.rank, "place": 0, "names": [node.name for node in nodes]},
            store_host=store_host,
            address=address,
            secret=self._requirements.secret,
            held_port=held_port,
        )

    def _start_message(self, nodes: Sequence[NodeConnection], notes: Sequence[str] = ()) -> Message:
        """Return the message that starts a node, but for its rank and place: as long for many nodes as for two."""
        more = [f"and {len(notes) - _SAID} more notes"] if len(notes) > _SAID else []
        return {
            "kind": "go",
            "run_id": self._requirements.run_id,
            "names": [nodes[0].name],
            "nodes": len(nodes),
            "change": self._changes,
            "world": sum(one.node_info.workers for one in nodes if one.node_info),
            "store_port": self._store_port,
            "silence": self._requirements.silence,
            "notes": [*notes[:_SAID], *more],
        }

    # While the run goes on: called by the launcher

    def stop(self, number: int, count: int) -> None:
        """Have every node pass a signal on to its workers."""
        self._loop.post(lambda: self._stop_all(number, count, None))

    def conclude(self, outcome: Mapping[str, Any]) -> Message:
        """Report how this node's workers ended, wait for the others', and return how the run ended."""
        self._loop.post(lambda: self._take_outcome(self.own, dict(outcome)))
        seconds = None if outcome["status"] == 0 else self._requirements.grace + LINGER_SECONDS
        if not self._done.wait(seconds):
            for node in self.awaited:
                self._note_loss(f"lost {node.name}: it did not report how it ended")
        return self._merged() if self._final is None else self._final

    def close(self) -> None:
        """Disconnect the others."""
        self._closing = True
        if not self._running:
            self._disconnect()

    # While the run goes on: in the thread that owns the connections

    def _listen(self) -> None:
        begin = last_look = last_ping = time.monotonic()
        silence = self._requirements.silence
        while not self._closing:
            now = time.monotonic()  # what has come by now is read before anybody counts as silent
            for node in self._turn():
                if node.is_closed and node.outcome is None and node.node_info is not None and not node.lost:
                    self._lose(node, "its launcher is gone")
            if now - last_ping > min(2.0, silence / 4):
                last_ping = now
                self._broadcast(kind="ping")
            if now - last_look > LOOK_SECONDS:
                last_look = now
                for node in self.awaited:
                    if max(node.heard, begin) < now - silence:
                        self._lose(node, f"no message for {silence:.0f} s")
            if self._final is not None and not self._done.is_set():
                self._flush()  # the process may end as soon as it is known here
                self._done.set()
        self._flush()

    def _lose(self, node: NodeConnection, why: str) -> None:
        node.lost = True
        node.close()
        if not self._is_stopping and not self._ended and self._requirements.least < self._requirements.most:
            left = len(self.present)
            self._tell(f"lost {node.name}: {why}; {left} nodes resume from the last checkpoint")
            self._change_members()
        else:  # also after the end began: what failed first may have failed because this node had gone
            self._note_loss(f"lost {node.name}: {why}")
            if not self._is_stopping:
                self._end(at_once=True)
        self._check_done()

    def _change_members(self, joining: NodeConnection | None = None) -> None:
        """Have the nodes that take part now start their workers again; one that joins starts its first ones."""
        self._changes += 1
        nodes = self.by_rank
        for place, node in enumerate(nodes):
            members = {"change": self._changes, "place": place, "nodes": len(nodes)}
            if node is self.own:
                self.actions.change(members)
            elif node is joining:
                node.send(**self._start_message(nodes), rank=node.rank, place=place)
            else:
                node.send(kind="members", **members)

    def _note_loss(self, loss: str) -> None:
        if self._is_stopping:  # that is how a node ends, and no reason
            self._tell(f"{loss}, after {self._stopped_by}")
        else:
            self._losses.append(loss)

    def _stop_all(self, number: int, count: int, sender: NodeConnection | None) -> None:
        if not self._is_stopping:
            self._stopped_by, self._is_stopping = signal_name(number), number not in WARNINGS
        if count <= self._signalled.get(number, 0):  # a scheduler signals every node, and each says so
            return
        self._signalled[number] = count
        self._broadcast(kind="stop", number=number, count=count, but=sender)
        if sender is not None:
            self.actions.stop(number, count)

    def _end(self, *, at_once: bool) -> None:
        """End every node: one has failed or gone, and the others need not wait for it."""
        if not self._ended:
            self._ended = True
            self._broadcast(kind="end", at_once=at_once)
            if self.own.outcome is None:
                self.actions.end(at_once)

    def _take_outcome(self, node: NodeConnection, outcome: dict[str, Any]) -> None:
        host = node.node_info.host if node.node_info else node.came_from
        node.outcome = {**outcome, "host": host, "rank": node.rank, "offset_ns": node.offset_ns}
        if self._ended:
            node.outcome["ended"] = True  # it was us who asked
        if not self._ended and has_failed(outcome):
            self._end(at_once=False)
        self._check_done()

    def _check_done(self) -> None:
        if self._final is None and self.own.outcome is not None and not self.awaited:
            self._final = self._merged()
            self._broadcast(kind="final", final=self._final | {"workers": []})  # they need the cause only

    def _merged(self) -> Message:
        nodes = sorted(self.connections, key=lambda node: node.rank)
        outcomes = [node.outcome for node in nodes if node.outcome is not None]
        is_stopped = self._is_stopping or any(outcome["stopped_by"] for outcome in outcomes)  # or warned only
        stopped_by = self._stopped_by if is_stopped else None
        return merge_outcomes(outcomes, lost=self._losses, stopped_by=stopped_by)

    def _take(self, node: NodeConnection, message: Message) -> None:
        kind = message["kind"]
        if (node.node_info is None) != (kind == "hello") or (kind == "outcome" and node.outcome is not None):
            raise ProtocolError  # who has not presented itself has no say, and nobody does anything twice
        if kind == "hello":
            self._admit(node, message)
        elif kind == "reached":
            node.reached = message["why_not"]
        elif kind == "stop":
            self._stop_all(message["number"], message["count"], node)
        elif kind == "steps":
            self.actions.keep_steps(node.rank, message["ranks"])
        elif kind == "outcome":
            self._take_outcome(node, message["outcome"])

    def _admit(self, node: NodeConnection, message: Message) -> None:
        """Answer a node that presents itself; one that comes while the others are about to start comes again."""
        required = self._requirements
        node_info, run_id = NodeInfo.from_message(message["node"]), message["run_id"]
        node.offset_ns = time.time_ns() - message["time_ns"]
        if run_id and run_id != required.run_id:
            why = f"{self.own.name} runs {required.run_id}, not {run_id}"
            node.send(kind="refused", message=why, hint="use another port")
        elif not self._running:
            if self._is_complete or len(self.present) >= required.most:
                node.close()
            else:
                node.node_info = node_info
        elif obstacle := self._late_obstacle(node_info):
            node.send(kind="refused", message=obstacle[0], hint=obstacle[1])
        else:  # an elastic run takes it in
            taken = {one.rank for one in self.present}
            free = next(rank for rank in range(required.most) if rank not in taken)
            node.node_info, node.rank = node_info, free if node_info.rank is None else node_info.rank
            self._tell(f"{node.name} joins as node {node.rank}: all workers restart")
            self._change_members(node)

    def _late_obstacle(self, node_info: NodeInfo) -> tuple[str, str] | None:
        required, own, others = self._requirements, self.own, self.present
        if len(others) >= required.most or required.least == required.most or self._ended:
            words = f"{own.name} already runs {required.run_id} with {len(others)} nodes"
            return words, "wait until it ends, or use another port"
        found = find_incompatibilities([own.node_info or node_info, node_info], most=required.most)
        if fatal := [one for one in found if one.fatal]:
            return "; ".join(one.message for one in fatal), fatal[0].hint
        if same := [one.name for one in others if one.rank == node_info.rank]:
            hint = "set a different --machine-rank on each node, or on none: ranks are then assigned"
            return f"{same[0]} already is node {node_info.rank}", hint
        return None

    # Connections, in the same thread

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

    def _turn(self, seconds: float = TURN_SECONDS) -> list[NodeConnection]:
        """Wait for something to happen on any connection, and handle it; return those that did it."""
        if len(self.connections) > _MANY:
            time.sleep(_PAUSE_SECONDS)  # what comes meanwhile is one turn's work, and not as many turns'
        self._loop.turn(seconds)
        served, self._served = self._served, []
        if any(node.is_closed for node in served):
            # Who leaves before the run starts may come again; who has never been a node leaves nothing.
            self.connections = [
                node
                for node in self.connections
                if not node.is_closed or (self._running and node.node_info is not None)
            ]
        # Who proves nothing in time has to go, and the oldest of too many.
        unproven = [node for node in self.connections if node.handshake is not None]
        too_many = len(unproven) - max(UNPROVEN, self._requirements.most)
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
            handshake = CoordinatorHandshake(self._requirements.secret)
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
        self._loop.notice()

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
            self._tell(f"{address} connected {which} and was rejected: it does not belong to this run")
        connection.send_line(answer)
        if accepted:
            node.handshake, connection.limit = None, MAX_BYTES
        else:
            connection.close()

    def _broadcast(self, *, but: NodeConnection | None = None, **message: Any) -> None:
        """Send a message to every present node, or to all but one."""
        line = json.dumps(message)
        for node in self.present:
            if node is not but and node.connection is not None:
                node.connection.send_line(line)

    def _flush(self) -> None:
        """Send what waits before the process goes on."""
        self._loop.flush([node.connection for node in self.connections if node.connection is not None])

    def _disconnect(self) -> None:
        """Close every connection and the listener."""
        for node in self.connections:
            node.close()
        self._listening.close()
        self._loop.close()
