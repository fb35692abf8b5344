"""The coordinator before the run: wait for the nodes, compare them, have them try each other, start them."""

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fsdplaunch.errors import MachineError
from fsdplaunch.held_port import held
from fsdplaunch.launch.coordination.connected_nodes import NodeConnection
from fsdplaunch.launch.coordination.interfaces import JoinProgress, RunAssignment
from fsdplaunch.launch.coordination.network import ALL_ADDRESSES, is_loopback, reason
from fsdplaunch.launch.coordination.node_info import assign_ranks, find_incompatibilities
from fsdplaunch.launch.coordination.protocol import encode
from fsdplaunch.launch.coordination.reachability import (
    reachability_targets,
    targets,
    try_to_reach,
    unreachable,
)
from fsdplaunch.launch.coordination.server import CoordinatorServer
from fsdplaunch.launch.coordination.wire_types import Message
from fsdplaunch.launch.finding import Finding

_SAID = 8
"""Most findings that every node is told of."""
REACH_SECONDS = 15.0
"""How long nodes may take to try each other."""
TOLD_AT_ONCE, NEWS_SECONDS = 128, 1.0
"""How many nodes are told, and how often, how many are here: a thousand hear it less often, not more is sent."""


class JoinPhase:
    """Turns the nodes that connect to a server into one run."""

    def __init__(self, server: CoordinatorServer) -> None:
        self._server = server
        self._requirements = server.requirements
        self._last_news = 0.0
        self._to_be_told: list[NodeConnection] = []

    def gather(self, progress: JoinProgress) -> RunAssignment:
        """Wait for the nodes, compare them, have them try each other, and start them.

        Raises:
            MachineError: Not enough came, or they cannot run together; every one that came has been told.
        """
        try:
            self._await_nodes(progress)
        finally:
            progress.end()
        self._server.is_complete = True
        self._learn_address()
        found = find_incompatibilities(self._server.node_infos, most=self._requirements.most)
        if not any(one.fatal for one in found):
            self._assign_ranks()
            found += self._try_each_other()
        if fatal := [one for one in found if one.fatal]:
            raise self._refuse(fatal)
        return self._start_nodes([one.message for one in found])

    def _await_nodes(self, progress: JoinProgress) -> None:
        required, enough_since = self._requirements, None
        while (here := self._server.nodes.number_present) < required.most:
            now = time.monotonic()
            enough_since = (enough_since or now) if here >= required.least else None
            if enough_since is not None and now - enough_since > required.last_call:
                return
            if enough_since is None and progress.seconds > required.seconds:
                raise self._refuse([self._missing()])
            progress.show(f"{here} of {required.least} nodes here")
            if now - self._last_news > NEWS_SECONDS:
                self._last_news = now
                self._spread_news(kind="waiting", here=here, of=required.least)
            self._server.turn()
            for node, node_info in self._server.take_late():  # one that was there may have left again
                self._server.let_in(node, node_info)

    def _spread_news(self, **message: Any) -> None:
        """Send a message to those that have waited longest for one."""
        waiting = self._to_be_told or self._server.present
        line = encode(message)
        for node in waiting[:TOLD_AT_ONCE]:
            node.send_line(line)
        self._to_be_told = waiting[TOLD_AT_ONCE:]

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

    def _assign_ranks(self) -> None:
        for node, rank in zip(self._server.present, assign_ranks(self._server.node_infos), strict=True):
            node.rank = rank
        self._server.nodes.order()

    def _try_each_other(self) -> list[Finding]:
        """Have every node connect to others, as the workers will."""
        present = self._server.present
        rows = reachability_targets([(node.rank, node.node_info) for node in present if node.node_info])
        for place, node in enumerate(present):  # each is told of those that it tries, and not of all
            node.send(kind="try", nodes=[rows[other] for other in targets(len(rows), place)])
        mine = [rows[other] for other in targets(len(rows), present.index(self._server.own))]
        threading.Thread(target=self._try_own, args=(mine,), daemon=True).start()
        end, own = time.monotonic() + REACH_SECONDS, self._server.own
        waiting = set(present)
        while waiting and time.monotonic() < end:
            changed = [*self._server.turn(0.05), own]
            waiting.difference_update(node for node in changed if node.reached is not None or node.is_closed)
        reached = {node.name: node.reached for node in self._server.present}
        if len(reached) < self._requirements.least:
            reached |= {node.name: None for node in present if node.is_closed}
        return unreachable(reached)

    def _try_own(self, nodes: list[Message]) -> None:
        self._server.own.reached = try_to_reach(nodes)

    def _refuse(self, findings: Sequence[Finding]) -> MachineError:
        """Tell every node what is wrong, and return it."""
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
        store_host = self._store_host(nodes[1:], address)
        held_port = self._hold_store_port(store_host)
        run = start_message(self._server, nodes, notes)
        for node in nodes[1:]:
            node.send(**run, rank=node.rank)
        self._server.running = True
        names = [node.name for node in nodes]
        return RunAssignment.from_message(
            {**run, "rank": own.rank, "names": names},
            store_host=store_host,
            address=address,
            secret=self._requirements.secret,
            held_port=held_port,
        )

    def _hold_store_port(self, host: str) -> socket.socket:
        """Bind the port that the others are about to be told: a free one, which is nobody's `main_process_port`.

        Raises:
            MachineError: No port of that address is free; every node has been told.
        """
        try:
            held_port = held(host)
        except OSError as error:
            message = f"torch's store cannot listen at {host} on {self._server.own.name}: {reason(error)}"
            hint = "is that an address of node 0? set launch.local_address or launch.network_interface there"
            raise self._refuse([Finding(message=message, hint=hint)]) from None
        self._server.store_port = int(held_port.getsockname()[1])
        return held_port

    @staticmethod
    def _store_host(others: Sequence[NodeConnection], address: str) -> str:
        """Return where the store is to listen: where the others came to; everywhere where they came to several."""
        found = {node.came_to for node in others}
        if not found:
            return address
        return found.pop() if len(found) == 1 else ALL_ADDRESSES


def start_message(
    server: CoordinatorServer, nodes: Sequence[NodeConnection], notes: Sequence[str] = ()
) -> Message:
    """Return the message that starts a node, but for its rank: as long for many nodes as for two.

    Args:
        server: The coordinator's.
        nodes: All that take part, by rank.
        notes: What the user of every node is to be told.
    """
    more = [f"and {len(notes) - _SAID} more notes"] if len(notes) > _SAID else []
    return {
        "kind": "go",
        "run_id": server.requirements.run_id,
        "names": [nodes[0].name],
        "nodes": len(nodes),
        "world": sum(one.node_info.workers for one in nodes if one.node_info),
        "store_port": server.store_port,
        "silence": server.requirements.silence,
        "notes": [*notes[:_SAID], *more],
    }
