"""The coordinator, node 0's launcher: who joins, how is every node doing, who stops, how did the run end.

Before the run it waits for the nodes, compares them, has them try each other, and starts them. One thread owns the
connections: the launcher's own until the run starts, then one in the background.
"""

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdplaunch.errors import EXIT_FAILED, MachineError
from fsdplaunch.launch.coordination.network import ALL_ADDRESSES, is_loopback, reason
from fsdplaunch.launch.coordination.node_info import (
    NodeInfo,
    assign_ranks,
    find_incompatibilities,
    reachability_targets,
    targets,
    try_to_reach,
    unreachable,
)
from fsdplaunch.launch.coordination.protocol import Message, ProtocolError
from fsdplaunch.launch.coordination.run_control import (
    PAUSE_SECONDS,
    JoinProgress,
    OwnPause,
    RunActions,
    RunAssignment,
    Tell,
    end_of_run,
    has_failed,
    merge_outcomes,
)
from fsdplaunch.launch.coordination.server import CoordinatorServer, JoinRequirements, NodeConnection
from fsdplaunch.launch.preflight import Finding
from fsdplaunch.launch.root_cause import WARNINGS, signal_name
from fsdplaunch.sockets import held

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


class JoinPhase:
    """Turns the nodes that connect to a server into one run."""

    def __init__(self, server: CoordinatorServer) -> None:
        self._server = server
        self._requirements = server.requirements
        self._last_news = 0.0

    def gather(self, progress: JoinProgress) -> RunAssignment:
        """Wait for the nodes, compare them, have them try each other, and start them.

        Raises:
            MachineError: Not enough came, or they cannot run together; every one that came knows why.
        """
        try:
            self._await_nodes(progress)
        finally:
            progress.end()
        self._server.is_complete = True
        self._learn_address()
        found = find_incompatibilities(self._server.node_infos, most=self._requirements.most)
        if not any(one.fatal for one in found):
            for node, rank in zip(self._server.present, assign_ranks(self._server.node_infos), strict=True):
                node.rank = rank
            found += self._try_each_other()
        if fatal := [one for one in found if one.fatal]:
            raise self._refuse(fatal)
        return self._start_nodes([one.message for one in found])

    def _await_nodes(self, progress: JoinProgress) -> None:
        required, enough_since = self._requirements, None
        while (here := len(self._server.present)) < required.most:
            now = time.monotonic()
            enough_since = (enough_since or now) if here >= required.least else None
            if enough_since is not None and now - enough_since > required.last_call:
                return
            if enough_since is None and progress.seconds > required.seconds:
                raise self._refuse([self._missing()])
            progress.show(f"{here} of {required.least} nodes here")
            if now - self._last_news > NEWS_SECONDS:
                self._last_news = now
                self._server.broadcast(kind="waiting", here=here, of=required.least)
            self._server.turn()
            for node, node_info in self._server.take_late():  # one that was there may have left again
                self._server.let_in(node, node_info)

    def _learn_address(self) -> None:
        """Take the address that the others connected to as our own: the workers can reach it as well."""
        addresses = (node.came_to for node in self._server.present)
        found = next((address for address in addresses if address and not is_loopback(address)), None)
        own = self._server.own
        if found and own.node_info and not self._requirements.address_is_set:
            own.node_info = replace(own.node_info, address=found)

    def _missing(self) -> Finding:
        required, infos = self._requirements, self._server.node_infos
        names, taken = ", ".join(one.name for one in infos), set(assign_ranks(infos))
        known = dict(enumerate(required.expected))
        missing = [known.get(rank, f"node {rank}") for rank in range(required.least) if rank not in taken]
        return Finding(
            message=f"{len(taken)} of {required.least} nodes came within {required.seconds:.0f} s: {names}; "
            f"missing: {', '.join(missing)}",
            hint=f"start the same command there; can they reach port {self._server.port} of "
            f"{self._server.own.name}?",
        )

    def _try_each_other(self) -> list[Finding]:
        """Have every node connect to others, as the workers will."""
        present = sorted(self._server.present, key=lambda node: node.rank)
        rows = reachability_targets([(node.rank, node.node_info) for node in present if node.node_info])
        for place, node in enumerate(present):  # each is told of those that it tries, and not of all
            node.send(kind="try", nodes=[rows[other] for other in targets(len(rows), place)])
        mine = [rows[other] for other in targets(len(rows), present.index(self._server.own))]
        end, own = time.monotonic() + _REACH_SECONDS, self._server.own

        def try_own() -> None:
            own.reached = try_to_reach(mine)

        threading.Thread(target=try_own, daemon=True).start()
        waiting = set(present)
        while waiting and time.monotonic() < end:
            changed = [*self._server.turn(0.05), own]
            waiting.difference_update(node for node in changed if node.reached is not None or node.is_closed)
        reached = {node.name: node.reached for node in self._server.present}
        if len(reached) < self._requirements.least:
            reached |= {node.name: None for node in present if node.is_closed}
        return unreachable(reached)

    def _refuse(self, findings: Sequence[Finding]) -> MachineError:
        """Send every node what is wrong, and return it."""
        message = "; ".join(one.message for one in findings[:_SAID])
        if len(findings) > _SAID:
            message += f"; and {len(findings) - _SAID} more"
        hint = findings[0].hint
        self._server.broadcast(kind="refused", message=message, hint=hint)
        self._server.flush()
        self._server.shut()
        return MachineError(message, hint=hint)

    def _start_nodes(self, notes: Sequence[str]) -> RunAssignment:
        nodes = sorted(self._server.present, key=lambda node: node.rank)
        own = self._server.own
        address = own.node_info.address if own.node_info else ""
        address = address or next((node.came_from for node in nodes[1:] if node.came_from), "")
        came_to = {node.came_to for node in nodes[1:]} or {address}
        store_host = came_to.pop() if len(came_to) == 1 else ALL_ADDRESSES
        held_port = self._hold_store_port(store_host)
        run = _start_message(self._server, nodes, notes)
        for place, node in enumerate(nodes[1:], 1):
            node.send(**run, rank=node.rank, place=place)
        self._server.running = True
        return RunAssignment.from_message(
            {**run, "rank": own.rank, "place": 0, "names": [node.name for node in nodes]},
            store_host=store_host,
            address=address,
            secret=self._requirements.secret,
            held_port=held_port,
        )

    def _hold_store_port(self, host: str) -> socket.socket:
        """Bind the port that the others are about to be told: a free one, nobody's `main_process_port`."""
        try:
            held_port = held(host)
        except OSError as error:
            message = f"torch's store cannot listen at {host} on {self._server.own.name}: {reason(error)}"
            hint = "is that an address of node 0? set launch.local_address or launch.network_interface there"
            raise self._refuse([Finding(message=message, hint=hint)]) from None
        self._server.store_port = int(held_port.getsockname()[1])
        return held_port


def _start_message(
    server: CoordinatorServer, nodes: Sequence[NodeConnection], notes: Sequence[str] = (), *, change: int = 0
) -> Message:
    """Return the message that starts a node, but for its rank and place: as long for many nodes as for two."""
    more = [f"and {len(notes) - _SAID} more notes"] if len(notes) > _SAID else []
    return {
        "kind": "go",
        "run_id": server.requirements.run_id,
        "names": [nodes[0].name],
        "nodes": len(nodes),
        "change": change,
        "world": sum(one.node_info.workers for one in nodes if one.node_info),
        "store_port": server.store_port,
        "silence": server.requirements.silence,
        "notes": [*notes[:_SAID], *more],
    }


class Coordinator:
    """Node 0's launcher, for the others: first they join, then they run."""

    assignment: RunAssignment
    _pause: OwnPause

    def __init__(
        self, listener: socket.socket, node_info: NodeInfo, requirements: JoinRequirements, tell: Tell
    ) -> None:
        self.actions = RunActions()
        self._requirements = requirements
        self._server = CoordinatorServer(listener, node_info, requirements, self._take, tell)
        self._tell = tell
        self._last_ping = self._last_look = 0.0
        self._signalled: dict[int, int] = {}
        self._stopped_by: str | None = None
        self._is_stopping = False
        self._changes = 0
        self._losses: list[str] = []
        self._ended = False
        self._final: Message | None = None
        self._done = threading.Event()
        self._closing = False

    def gather(self, progress: JoinProgress) -> RunAssignment:
        """Wait for the nodes, and start them.

        Raises:
            MachineError: Not enough came, or they cannot run together; every one that came knows why.
        """
        self.assignment = JoinPhase(self._server).gather(progress)
        return self.assignment

    def start(self) -> None:
        """Go on listening in the background."""
        self._last_ping = time.monotonic()
        self._pause = OwnPause(PAUSE_SECONDS)
        for node in self._server.awaited:
            node.heard = time.monotonic()  # silence counts from now on
        threading.Thread(target=self._attend, daemon=True).start()

    def stop(self, number: int, count: int) -> None:
        """Have every node pass a signal on to its workers."""
        self._server.loop.post(lambda: self._stop_all(number, count, None))

    def conclude(self, outcome: Mapping[str, Any]) -> Message:
        """Report how this node's workers ended, wait for the others', and return how the run ended."""
        self._server.loop.post(lambda: self._take_outcome(self._server.own, dict(outcome)))
        seconds = None if outcome["status"] == 0 else self._requirements.grace + LINGER_SECONDS
        if not self._done.wait(seconds):
            for node in self._server.awaited:
                self._note_loss(f"lost {node.name}: it did not report how it ended")
        return self._merged(outcome) if self._final is None else self._final

    def close(self) -> None:
        """Disconnect the others."""
        self._closing = True
        if not self._server.running:
            self._server.shut()

    def _attend(self) -> None:
        try:
            for node, node_info in self._server.take_late():
                self._admit_late(node, node_info)
            while not self._closing:
                for node in self._server.turn():
                    if node.is_closed and node.outcome is None and node.node_info is not None and not node.lost:
                        self._lose(node, "its launcher has gone")
                self._look_after_nodes()
                if self._final is not None and not self._done.is_set():
                    self._server.flush()  # the process may end as soon as it is known here
                    self._done.set()
            self._server.flush()
        except Exception as error:  # without this thread nobody hears from the others: that is not a success
            self._final = end_of_run(EXIT_FAILED, error=f"node 0 lost track of the others: {error!r}")
            self._done.set()
            self.actions.end(True)
        finally:
            self._server.shut()

    def _look_after_nodes(self) -> None:
        now, silence = time.monotonic(), self._requirements.silence
        if now - self._last_look < LOOK_SECONDS:
            return
        self._last_look = now
        was_away = self._pause.has_just_ended()
        if now - self._last_ping > min(2.0, silence / 4):
            self._last_ping = now
            self._server.broadcast(kind="ping")
        for node in self._server.awaited if not was_away else ():
            if node.heard < now - silence:
                self._lose(node, f"no message for {silence:.0f} s")

    def _lose(self, node: NodeConnection, why: str) -> None:
        node.lost = True
        node.close()
        if self._is_stopping:
            self._note_loss(f"lost {node.name}: {why}")
        elif self._requirements.least < self._requirements.most and not self._ended:
            left = len(self._server.present)
            self._tell(f"lost {node.name}: {why}; {left} nodes go on from the last checkpoint")
            self._change_members()
        else:  # also after the end began: what failed first may have failed because this node had gone
            self._note_loss(f"lost {node.name}: {why}")
            self._end(at_once=True)
        self._check_done()

    def _change_members(self, joining: NodeConnection | None = None) -> None:
        """Have the nodes that take part now start their workers again; one that joins starts its first ones."""
        self._changes += 1
        nodes = sorted(self._server.present, key=lambda node: node.rank)
        for place, node in enumerate(nodes):
            members = {"change": self._changes, "place": place, "nodes": len(nodes)}
            if node is self._server.own:
                self.actions.change(members)
            elif node is joining:
                run = _start_message(self._server, nodes, change=self._changes)
                node.send(**run, rank=node.rank, place=place)
            else:
                node.send(kind="members", **members)

    def _note_loss(self, loss: str) -> None:
        """Note that a node has gone; where the run was asked to end, that is how a node ends, and no reason."""
        if self._is_stopping:
            self._tell(f"{loss}, after {self._stopped_by}")
        else:
            self._losses.append(loss)

    def _stop_all(self, number: int, count: int, sender: NodeConnection | None) -> None:
        if not self._is_stopping:
            self._stopped_by, self._is_stopping = signal_name(number), number not in WARNINGS
        if count <= self._signalled.get(number, 0):  # a scheduler signals every node, and each says so
            return
        self._signalled[number] = count
        self._server.broadcast(kind="stop", number=number, count=count, but=sender)
        if sender is not None:
            self.actions.stop(number, count)

    def _end(self, *, at_once: bool) -> None:
        """End every node: one has failed or gone, and the others need not wait for it."""
        if not self._ended:
            self._ended = True
            self._server.broadcast(kind="end", at_once=at_once)
            if self._server.own.outcome is None:
                self.actions.end(at_once)

    def _take_outcome(self, node: NodeConnection, outcome: dict[str, Any]) -> None:
        # `ended`: it was us who asked.
        node.outcome = self._with_place(node, outcome) | ({"ended": True} if self._ended else {})
        if not self._ended and has_failed(outcome):
            self._end(at_once=False)
        self._check_done()

    @staticmethod
    def _with_place(node: NodeConnection, outcome: Mapping[str, Any]) -> dict[str, Any]:
        host = node.node_info.host if node.node_info else node.came_from
        return {**outcome, "host": host, "rank": node.rank, "offset_ns": node.offset_ns}

    def _check_done(self) -> None:
        if self._final is None and self._server.own.outcome is not None and not self._server.awaited:
            self._final = self._merged()
            told = self._final | {"workers": []}  # the cause is enough for them
            self._server.broadcast(kind="final", final=told)

    def _merged(self, own: Mapping[str, Any] | None = None) -> Message:
        """Return how the run ended, by what has been reported; this node's part is always among it."""
        nodes = sorted(self._server.connections, key=lambda node: node.rank)
        outcomes = [node.outcome for node in nodes if node.outcome is not None]
        if own is not None and self._server.own.outcome is None:
            outcomes.append(self._with_place(self._server.own, own))
        is_stopped = self._is_stopping or any(outcome["stopped_by"] for outcome in outcomes)  # or warned only
        stopped_by = self._stopped_by if is_stopped else None
        return merge_outcomes(outcomes, lost=self._losses, stopped_by=stopped_by)

    def _take(self, node: NodeConnection, message: Message) -> None:
        """Handle what a node sends."""
        kind = message["kind"]
        if (node.node_info is None) != (kind == "hello") or (kind == "outcome" and node.outcome is not None):
            raise ProtocolError  # who has not presented itself has no say, and nobody does anything twice
        if kind == "hello":
            self._admit(node, message)
        elif kind == "reached":
            node.reached = message["failed"]
        elif kind == "stop":
            self._stop_all(message["number"], message["count"], node)
        elif kind == "outcome":
            self._take_outcome(node, message["outcome"])

    def _admit(self, node: NodeConnection, message: Message) -> None:
        name, run_id = self._server.own.name, self._requirements.run_id
        wanted = message["run_id"]
        if wanted and wanted != run_id:
            self._turn_away(node, f"{name} runs {run_id}, not {wanted}", "use another port")
            return
        node_info = NodeInfo.from_message(message["node"])
        node.offset_ns = time.time_ns() - message["time_ns"]
        if self._server.running:
            self._admit_late(node, node_info)
        else:
            self._server.let_in(node, node_info)

    def _admit_late(self, node: NodeConnection, node_info: NodeInfo) -> None:
        """Answer a node that comes while the run goes on: an elastic run may take it in."""
        others = [one for one in self._server.present if one is not node]
        if why := self._late_obstacle(node_info, others):
            self._turn_away(node, *why)
            return
        node.node_info = node_info
        taken = {one.rank for one in others}
        free = next(rank for rank in range(self._requirements.most) if rank not in taken)
        node.rank = free if node_info.rank is None else node_info.rank
        self._tell(f"{node.name} joins as node {node.rank}: all workers start again")
        self._change_members(node)

    def _late_obstacle(self, node_info: NodeInfo, others: Sequence[NodeConnection]) -> tuple[str, str] | None:
        """Return what keeps a node from joining the run while it goes on, and a hint."""
        required, own = self._requirements, self._server.own
        if len(others) >= required.most or required.least == required.most or self._ended:
            words = f"{own.name} already runs {required.run_id} with {len(others)} nodes"
            return words, "wait for its end, or use another port"
        found = find_incompatibilities([own.node_info or node_info, node_info], most=required.most)
        if fatal := [one for one in found if one.fatal]:
            return "; ".join(one.message for one in fatal), fatal[0].hint
        if same := [one.name for one in others if one.rank == node_info.rank]:
            hint = "give each node a rank of its own (--machine-rank), or none: it is then assigned"
            return f"{same[0]} already is node {node_info.rank}", hint
        return None

    def _turn_away(self, node: NodeConnection, message: str, hint: str) -> None:
        node.node_info = None
        node.send(kind="refused", message=message, hint=hint)
