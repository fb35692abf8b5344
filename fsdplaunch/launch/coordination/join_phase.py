"""Machine 0 before the run: wait for the machines, compare them, have them try each other, let them go."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from fsdplaunch.config.schema.parsers import join_endpoint
from fsdplaunch.errors import MachineError
from fsdplaunch.launch.coordination.interfaces import JoinProgress, RunAssignment
from fsdplaunch.launch.coordination.network import is_loopback
from fsdplaunch.launch.coordination.node_info import Incompatibility, assign_ranks, find_incompatibilities
from fsdplaunch.launch.coordination.protocol import Message
from fsdplaunch.launch.coordination.reachability import check_reach, reachability_targets, unreachable
from fsdplaunch.launch.coordination.server import CoordinatorServer, JoinRequirements, NodeConnection

REACH_SECONDS = 15.0
"""How long machines may take to try each other."""


class JoinPhase(CoordinatorServer):
    """The meeting itself."""

    assignment: RunAssignment
    _said = 0.0

    def gather(self, counter: JoinProgress) -> RunAssignment:
        """Wait for the machines, compare them, have them try each other, and let them go.

        Raises:
            MachineError: Not enough came, or they cannot run together; every one that came has been told.
        """
        try:
            self._await_machines(counter)
        finally:
            counter.end()
        self._learn_address()
        incompatibilities = find_incompatibilities(self._node_infos, most=self.requirements.most)
        if not any(incompatibility.fatal for incompatibility in incompatibilities):
            self._number()
            incompatibilities += self._try_each_other()
        fatal = [incompatibility for incompatibility in incompatibilities if incompatibility.fatal]
        if fatal:
            raise self._refuse(fatal)
        self.assignment = self._let_go(
            [incompatibility.message for incompatibility in incompatibilities if not incompatibility.fatal]
        )
        return self.assignment

    def _await_machines(self, counter: JoinProgress) -> None:
        enough_since: float | None = None
        while len(self._present) < self.requirements.most:
            here, now = len(self._present), time.monotonic()
            enough_since = (enough_since or now) if here >= self.requirements.least else None
            if enough_since is not None and now - enough_since > self.requirements.last_call:
                return
            if enough_since is None and counter.seconds > self.requirements.seconds:
                raise self._refuse([self._missing()])
            counter.show(f"{here} of {self.requirements.least} machines here")
            if now - self._said > 1:
                self._said = now
                self._broadcast(kind="waiting", here=here, of=self.requirements.least)
            self._turn()

    def _learn_address(self) -> None:
        """Be known by the address the others came to, which the workers can reach as well."""
        found = next(
            (node.came_to for node in self._present if node.came_to and not is_loopback(node.came_to)), None
        )
        if found and self._own.node_info and not self.requirements.address_said:
            self._own.node_info = replace(self._own.node_info, address=found)

    def _missing(self) -> Incompatibility:
        names = ", ".join(one.name for one in self._node_infos)
        taken = dict(zip(assign_ranks(self._node_infos), self._node_infos, strict=True))
        absent = [number for number in range(self.requirements.least) if number not in taken]
        who = [
            self.requirements.expected[n] if n < len(self.requirements.expected) else f"machine {n}"
            for n in absent
        ]
        message = (
            f"{len(taken)} of {self.requirements.least} machines came within {self.requirements.seconds:.0f} s: "
            f"{names}; missing: {', '.join(who)}"
        )
        port = self._listener.getsockname()[1]
        hint = f"start the same command there; can they reach port {port} of {self._own.name}?"
        return Incompatibility(message=message, hint=hint)

    def _number(self) -> None:
        for node, rank in zip(self._present, assign_ranks(self._node_infos), strict=True):
            node.rank = rank
        self._nodes.sort(key=lambda node: node.rank)

    def _try_each_other(self) -> list[Incompatibility]:
        """Have every machine connect to others, as the workers will."""
        roster = reachability_targets([(node.rank, node.node_info) for node in self._present if node.node_info])
        self._broadcast(kind="roster", machines=roster)
        mine = threading.Thread(target=self._try_own, args=(roster,), daemon=True)
        mine.start()
        end = time.monotonic() + REACH_SECONDS
        while any(node.reached is None for node in self._present) and time.monotonic() < end:
            self._turn(0.05)
        return unreachable({node.name: node.reached for node in self._present})

    def _try_own(self, roster: list[Message]) -> None:
        self._own.reached = check_reach(roster, own=self._own.rank)

    def _refuse(self, incompatibilities: Sequence[Incompatibility]) -> MachineError:
        """Tell everybody what is wrong, and return it."""
        message = "; ".join(incompatibility.message for incompatibility in incompatibilities)
        hint = incompatibilities[0].hint
        self._broadcast(kind="refused", message=message, hint=hint)
        self._flush()
        self._shut()
        return MachineError(message, hint=hint)

    def _let_go(self, notes: list[str]) -> RunAssignment:
        nodes = sorted(self._present, key=lambda node: node.rank)
        for node in nodes[1:]:
            self._send_go(node, nodes, notes)
        self._running = True
        address = next((node.came_from for node in nodes[1:] if node.came_from), "")
        own = self._own.node_info
        place = (own.address if own else "") or address
        return _agreement(
            nodes,
            self._own,
            self.requirements,
            join_endpoint(place, self.requirements.store_port),
            place,
            notes,
        )

    def _send_go(self, node: NodeConnection, nodes: Sequence[NodeConnection], notes: Sequence[str]) -> None:
        if node.connection is not None:
            node.connection.send(
                kind="go",
                run_id=self.requirements.run_id,
                rank=node.rank,
                names=[one.name for one in nodes],
                workers=[one.node_info.workers for one in nodes if one.node_info],
                store_port=self.requirements.store_port,
                silence=self.requirements.silence,
                notes=list(notes),
            )


def _agreement(
    nodes: Sequence[NodeConnection],
    own: NodeConnection,
    requirements: JoinRequirements,
    store: str,
    address: str,
    notes: Sequence[str],
) -> RunAssignment:
    return RunAssignment(
        run_id=requirements.run_id,
        rank=own.rank,
        names=[node.name for node in nodes],
        workers=[node.node_info.workers for node in nodes if node.node_info],
        store=store,
        address=address,
        notes=tuple(notes),
    )
