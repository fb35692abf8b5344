"""Machine 0's launcher, for the others: how is everybody doing, who stops, how did it end.

One thread owns the connections: the launcher's own until the run starts, then one in the background.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from fsdplaunch.launch.coordination.interfaces import RunActions, Tell
from fsdplaunch.launch.coordination.join_phase import JoinPhase
from fsdplaunch.launch.coordination.node_info import NodeInfo, find_incompatibilities
from fsdplaunch.launch.coordination.outcome import has_failed, merge_outcomes
from fsdplaunch.launch.coordination.protocol import PROTOCOL, Message, number_of, text_of
from fsdplaunch.launch.coordination.server import JoinRequirements, NodeConnection
from fsdplaunch.launch.report.root_cause import signal_name

LINGER_SECONDS = 15.0
"""How long the others may take, after their grace, to end when one machine has failed."""


class Coordinator(JoinPhase):
    """The launcher of machine 0, for the others: first the meeting, then the run."""

    def __init__(
        self, listener: socket.socket, node_info: NodeInfo, requirements: JoinRequirements, tell: Tell
    ) -> None:
        super().__init__(listener, node_info, requirements)
        self.actions = RunActions()
        self._tell = tell
        self._stopped_by: str | None = None
        self._losses: list[str] = []
        self._ended = False
        self._final: Message | None = None
        self._done = threading.Event()
        self._closing = False

    def start(self) -> None:
        """Go on listening in the background."""
        threading.Thread(target=self._attend, daemon=True).start()

    def stop(self, number: int, count: int) -> None:
        """Have every machine pass a signal on to its workers."""
        self._mail.post(lambda: self._stop_all(number, count, None))

    def settle(self, outcome: Mapping[str, Any]) -> Message:
        """Report how this machine's part ended, wait for the others', and return how the run ended."""
        self._mail.post(lambda: self._take_outcome(self._own, dict(outcome)))
        patience = None if outcome["status"] == 0 else self.requirements.grace + LINGER_SECONDS
        self._done.wait(patience)
        if self._final is None:
            return self._conclusion()
        return self._final

    def close(self) -> None:
        """Let the others go."""
        self._closing = True
        if not self._running:
            self._shut()

    def _attend(self) -> None:
        while not self._closing:
            self._turn()
            self._look_after_everybody()
        self._flush()
        self._shut()

    def _look_after_everybody(self) -> None:
        now = time.monotonic()
        if now - self._said > min(2.0, self.requirements.silence / 4):
            self._said = now
            self._broadcast(kind="ping")
        for node in self._present:
            silent = now - node.heard > self.requirements.silence
            if node.connection and node.outcome is None and (silent or not node.connection.open):
                why = f"no word for {self.requirements.silence:.0f} s" if silent else "its launcher has gone"
                self._lose(node, why)

    def _lose(self, node: NodeConnection, why: str) -> None:
        node.lost = True
        if node.connection is not None:
            node.connection.close()
        left = len(self._present)
        if self.requirements.least < self.requirements.most and not self._ended:
            self._tell(f"lost {node.name}: {why}; {left} machines go on from the last checkpoint")
            self._broadcast(kind="lost", name=node.name)
            self.actions.change()
        elif not self._ended:
            self._losses.append(f"lost {node.name}: {why}")
            self._end(at_once=True)
        self._check_done()

    def _stop_all(self, number: int, count: int, sender: NodeConnection | None) -> None:
        self._stopped_by = self._stopped_by or signal_name(number)
        for node in self._present:
            if node is not sender and node.connection is not None:
                node.connection.send(kind="stop", number=number, count=count)
        if sender is not None:
            self.actions.stop(number, count)

    def _end(self, *, at_once: bool) -> None:
        """One machine has failed or gone: the others need not wait for it."""
        if not self._ended:
            self._ended = True
            self._broadcast(kind="end", at_once=at_once)
            if self._own.outcome is None:
                self.actions.end(at_once)

    def _take_outcome(self, node: NodeConnection, outcome: dict[str, Any]) -> None:
        node.outcome = outcome | {
            "host": node.node_info.host if node.node_info else node.came_from,
            "rank": node.rank,
            "offset_ns": node.offset_ns,
        }
        if self._ended:
            node.outcome["ended"] = True  # it was us who asked
        elif has_failed(outcome):
            self._end(at_once=False)
        self._check_done()

    def _check_done(self) -> None:
        if self._final is None and all(node.outcome is not None for node in self._present):
            self._final = self._conclusion()
            self._broadcast(kind="final", final=_without_workers(self._final))
            self._flush()
            self._done.set()

    def _conclusion(self) -> Message:
        outcomes = [node.outcome for node in self._nodes if node.outcome is not None]
        return merge_outcomes(outcomes, lost=self._losses, stopped_by=self._stopped_by)

    def take(self, node: NodeConnection, message: Message) -> None:
        """Deal with what a machine says."""
        handlers: dict[str, Callable[[NodeConnection, Message], None]] = {
            "hello": self._greet,
            "reached": lambda node, message: setattr(node, "reached", list(message["failed"])),
            "stop": lambda node, message: self._stop_all(int(message["number"]), int(message["count"]), node),
            "outcome": lambda node, message: self._take_outcome(node, dict(message["outcome"])),
            "ping": lambda _seat, _message: None,
        }
        kind = text_of(message, "kind")
        if node.node_info is None and kind != "hello":
            raise KeyError(kind)  # who has not presented itself has no say
        handlers[kind](node, message)

    def _greet(self, node: NodeConnection, message: Message) -> None:
        if text_of(message, "protocol") != PROTOCOL:
            self._turn_away(node, f"{self._own.name} speaks {PROTOCOL}", "install the same version everywhere")
            return
        wanted = text_of(message, "run_id")
        if wanted and wanted != self.requirements.run_id:
            self._turn_away(
                node, f"{self._own.name} runs {self.requirements.run_id}, not {wanted}", "use another port"
            )
            return
        node.node_info = NodeInfo.from_message(message["greeting"])
        node.offset_ns = time.time_ns() - (number_of(message, "time_ns") or time.time_ns())
        if self._running:
            self._greet_late(node, node.node_info)

    def _greet_late(self, node: NodeConnection, node_info: NodeInfo) -> None:
        """A machine that comes while the run goes on: an elastic run may take it in."""
        others = [one for one in self._present if one is not node]
        free = next((n for n in range(self.requirements.most) if n not in {one.rank for one in others}), None)
        if free is None or self.requirements.least == self.requirements.most or self._ended:
            words = f"{self._own.name} already runs {self.requirements.run_id} with {len(others)} machines"
            self._turn_away(node, words, "wait for its end, or use another port")
            return
        own = self._own.node_info or node_info
        faults = [
            fault for fault in find_incompatibilities([own, node_info], most=self.requirements.most) if fault.fatal
        ]
        if faults:
            self._turn_away(node, "; ".join(fault.message for fault in faults), faults[0].hint)
            return
        node.rank = free
        self._tell(f"{node.name} joins as machine {free}: all workers start again")
        self._send_go(node, sorted([*others, node], key=lambda one: one.rank), [])

    def _turn_away(self, node: NodeConnection, message: str, hint: str) -> None:
        node.node_info = None
        if node.connection is not None:
            node.connection.send(kind="refused", message=message, hint=hint)


def _without_workers(final: Message) -> Message:
    """What the other machines are told: the cause is enough for them."""
    return {name: value for name, value in final.items() if name != "workers"} | {"workers": []}
