"""Every other machine's side of the meeting: find machine 0, be told to go, report, hear how it ended."""

import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fsdplaunch.config.schema.parsers import join_endpoint
from fsdplaunch.errors import EXIT_MACHINE, MachineError
from fsdplaunch.launch.coordination.interfaces import JoinProgress, RunActions, RunAssignment, Tell, WakeUp
from fsdplaunch.launch.coordination.network import reason
from fsdplaunch.launch.coordination.node_info import NodeInfo
from fsdplaunch.launch.coordination.protocol import PROTOCOL, Connection, Message, ProtocolError, text_of
from fsdplaunch.launch.coordination.reachability import check_reach

TURN_SECONDS = 0.5
RETRY_SECONDS = 0.5
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0
"""How long machine 0 may take to say its first word; another program says none, or the wrong one."""
FINAL_SECONDS = 20.0
"""How long to wait, after the grace, to hear how the run ended."""


class NodeClient:
    """The launcher of one machine, for machine 0."""

    def __init__(self, host: str, port: int, *, seconds: float, grace: float, tell: Tell) -> None:
        self.actions = RunActions()
        self.assignment: RunAssignment
        self._place = (host, port)
        self._seconds, self._grace = seconds, grace
        self._tell = tell
        self._connection: Connection
        self._mail = WakeUp()
        self._silence = 10.0
        self._heard = time.monotonic()
        self._final: Message | None = None
        self._done = threading.Event()
        self._closing = False
        self._reported = False

    @property
    def _address(self) -> str:
        return f"{self._place[0]}:{self._place[1]}"

    # -- the meeting ------------------------------------------------------------------------------------------

    def connect(self, counter: JoinProgress) -> str:
        """Connect to machine 0, however long it takes to start; return this machine's address on the way there.

        Raises:
            MachineError: Nothing answered in time.
        """
        why = "no answer"
        while counter.seconds < self._seconds:
            try:
                left = max(0.1, self._seconds - counter.seconds)
                sock = socket.create_connection(self._place, timeout=min(CONNECT_SECONDS, left))
            except OSError as error:
                why = reason(error)
                counter.show(f"waiting for machine 0 at {self._address} ({why})")
                time.sleep(RETRY_SECONDS)
            else:
                counter.end()
                self._connection = Connection(sock)
                return str(sock.getsockname()[0]).removeprefix("::ffff:")
        counter.end()
        msg = f"machine 0 could not be reached at {self._address} within {self._seconds:.0f} s: {why}"
        raise MachineError(
            msg, hint=_HINTS.get(why, "is it the right address, and does a firewall let it through?")
        )

    def join(self, node_info: NodeInfo, counter: JoinProgress, *, run_id: str = "") -> RunAssignment:
        """Present this machine and wait until machine 0 lets it go.

        Args:
            node_info: This machine.
            counter: Shows how far the wait has come.
            run_id: The run it belongs to; empty for any.

        Raises:
            MachineError: Machine 0 refused, vanished, or is another program.
        """
        self._connection.send(
            kind="hello", protocol=PROTOCOL, greeting=node_info.to_message(), time_ns=time.time_ns(), run_id=run_id
        )
        start, self._heard, answered = time.monotonic(), 0.0, False
        patience = min(ANSWER_SECONDS, 2 * self._seconds)
        try:
            while counter.seconds < self._seconds + ANSWER_SECONDS:
                for message in self._turn():
                    answered = True
                    if (done := self._negotiate(message, node_info, counter)) is not None:
                        self.assignment = done
                        return done
                if not self._connection.open or (not answered and time.monotonic() - start > patience):
                    break
        except ProtocolError:
            pass
        finally:
            counter.end()
        raise self._no_answer(answered=answered)

    def _no_answer(self, *, answered: bool) -> MachineError:
        if answered:
            msg = f"machine 0 at {self._address} has gone before the run started"
            return MachineError(msg, hint="see its output")
        msg = f"what listens at {self._address} is not fsdplaunch launch"
        return MachineError(msg, hint="choose another port with main_process_port, the same on every machine")

    def _negotiate(self, message: Message, node_info: NodeInfo, counter: JoinProgress) -> RunAssignment | None:
        kind = text_of(message, "kind")
        if kind == "refused":
            raise MachineError(text_of(message, "message"), hint=text_of(message, "hint") or None)
        if kind == "waiting":
            counter.show(f"{message.get('here')} of {message.get('of')} machines here")
        if kind == "roster":
            own = next((one["rank"] for one in message["machines"] if one["word"] == node_info.probe[1]), -1)
            self._connection.send(kind="reached", failed=check_reach(message["machines"], own=own))
        if kind != "go":
            return None
        self._silence = float(message.get("silence") or self._silence)
        return RunAssignment(
            run_id=message["run_id"],
            rank=message["rank"],
            names=message["names"],
            workers=message["workers"],
            store=join_endpoint(self._place[0], message["store_port"]),
            address=node_info.address,
            notes=tuple(message["notes"]),
        )

    # -- the run ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on listening in the background."""
        self._heard = time.monotonic()
        threading.Thread(target=self._attend, daemon=True).start()

    def stop(self, number: int, count: int) -> None:
        """Have every machine pass a signal on to its workers."""
        self._mail.post(lambda: self._connection.send(kind="stop", number=number, count=count))

    def settle(self, outcome: Mapping[str, Any]) -> Message:
        """Report how this machine's part ended, and return how the run ended."""
        self._reported = True
        self._mail.post(lambda: self._connection.send(kind="outcome", outcome=dict(outcome)))
        # After success the others may go on for as long as they like, and machine 0 says when it is over.
        self._done.wait(None if outcome["status"] == 0 else self._grace + FINAL_SECONDS)
        return self._final or self._alone(dict(outcome))

    def close(self) -> None:
        """Leave."""
        self._closing = True
        self._mail.post(lambda: None)

    def _alone(self, outcome: dict[str, Any]) -> Message:
        attempt = outcome.get("attempt") or {}
        return {
            "status": outcome["status"],
            "stopped_by": outcome["stopped_by"],
            "cause": attempt.get("cause"),
            "error": outcome["error"],
            "lost": [],
            "workers": [],
        }

    def _attend(self) -> None:
        said = 0.0
        while not self._closing and not self._done.is_set():
            try:
                messages = self._turn()
            except ProtocolError:
                messages = []
                self._connection.close()
            for message in messages:
                self._obey(message)
            for action in self._mail.collect():
                action()
            now = time.monotonic()
            if now - said > min(2.0, self._silence / 4):
                said = now
                self._connection.send(kind="ping")
            silent = now - self._heard > self._silence
            if (silent or not self._connection.open) and not self._done.is_set():
                self._lose(f"no word for {self._silence:.0f} s" if silent else "its launcher has gone")
        self._connection.close()

    def _lose(self, why: str) -> None:
        """Without machine 0 there is no store, and nothing can go on."""
        lost = f"lost machine 0 at {self._address}: {why}"
        self._final = {
            "status": EXIT_MACHINE,
            "stopped_by": None,
            "cause": None,
            "error": None,
            "lost": [lost],
            "workers": [],
        }
        self._done.set()
        if not self._reported:
            self.actions.end(True)

    def _obey(self, message: Message) -> None:
        actions: dict[str, Callable[[], None]] = {
            "stop": lambda: self.actions.stop(int(message["number"]), int(message["count"])),
            "end": lambda: self.actions.end(bool(message.get("at_once"))),
            "lost": self.actions.change,
            "final": lambda: self._hear_final(message["final"]),
        }
        actions.get(text_of(message, "kind"), lambda: None)()

    def _hear_final(self, final: Message) -> None:
        self._final = final
        self._done.set()

    def _turn(self) -> list[Message]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._mail.reader, selectors.EVENT_READ)
            if self._connection.open:
                selector.register(self._connection.sock, self._connection.wants)
            ready = selector.select(TURN_SECONDS)
        if not self._connection.open or not any(entry.fileobj is self._connection.sock for entry, _ in ready):
            return []
        self._connection.flush()
        messages = self._connection.receive()
        if messages:
            self._heard = time.monotonic()
        return messages


def with_address(node_info: NodeInfo, address: str) -> NodeInfo:
    """The greeting with the address the way to machine 0 showed, unless one was said."""
    return node_info if node_info.address else replace(node_info, address=address)


_HINTS = {
    "connection refused": "the machine is up and nothing listens there yet: start fsdplaunch launch on machine 0",
    "the name is not known": "set main_process_ip to machine 0's address, as numbers if names do not resolve here",
    "no route to host": "the machine is down or not on this network: is main_process_ip right?",
    "network is unreachable": "this machine has no way to that network: is main_process_ip right?",
}
