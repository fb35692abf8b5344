"""Every other node's side: find the coordinator, join, report, hear how the run ended."""

import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fsdplaunch.errors import EXIT_MACHINE, MachineError
from fsdplaunch.launch.coordination.network import obstacle_to, plain_address, reason
from fsdplaunch.launch.coordination.node_info import NodeInfo
from fsdplaunch.launch.coordination.protocol import (
    MAX_BYTES,
    PROTOCOL,
    TO_NODE,
    Connection,
    Loop,
    Message,
    NodeHandshake,
    ProtocolError,
    decode,
    text_of_line,
)
from fsdplaunch.launch.coordination.run_control import (
    JoinProgress,
    RunAssignment,
    RunControl,
    Tell,
    end_of_run,
    later,
)
from fsdplaunch.launch.coordination.secret_source import SecretSource
from fsdplaunch.launch.remote_steps import SEND_SECONDS
from fsdplaunch.launch.root_cause import WARNINGS, signal_name
from fsdplaunch.sockets import connected

TURN_SECONDS = 0.5
_RETRY_SECONDS = 0.5
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0
"""How long the coordinator may take to answer first; another program never does, or says something else."""
_FINAL_SECONDS = 20.0
"""How long to wait, after the grace, to hear how the run ended."""
_HINTS = {
    "connection refused": "the node is up and nothing listens there yet: start fsdplaunch launch on node 0",
    "the name is not known": "set main_process_ip to node 0's address, as numbers if names do not resolve here",
    "no route to host": "the node is down or not on this network: is main_process_ip right?",
    "network is unreachable": "this node has no route to that network: is main_process_ip right?",
}


class NodeClient(RunControl):
    """The launcher of a node other than node 0."""

    _connection: Connection

    def __init__(
        self, host: str, port: int, *, secret: SecretSource, seconds: float, grace: float, tell: Tell
    ) -> None:
        super().__init__(tell)
        self._place, self._address = (host, port), f"{host}:{port}"
        self._seconds, self._grace = seconds, grace
        self._secret = secret
        self._loop = Loop()
        self._silence = 10.0
        self._reported = False

    def connect(self, progress: JoinProgress) -> str:
        """Connect to node 0, however long it takes to start; return this node's address on the way there."""
        why = "no answer"
        try:
            while progress.seconds < self._seconds:
                try:
                    left = max(0.1, self._seconds - progress.seconds)
                    sock = connected(*self._place, min(CONNECT_SECONDS, left))
                except OSError as error:
                    why = reason(error)
                    progress.show(f"waiting for node 0 at {self._address} ({why})")
                else:
                    address = plain_address(sock.getsockname())
                    if self._is_taken(sock, progress.seconds):
                        return address
                    why = "it closed the connection"
                time.sleep(_RETRY_SECONDS)
        finally:
            progress.end()
        msg = f"node 0 could not be reached at {self._address} within {self._seconds:.0f} s: {why}"
        hint = _HINTS.get(why, "is it the right address, and does a firewall let it through?")
        raise MachineError(msg, hint=hint)

    def _is_taken(self, sock: socket.socket, waited: float) -> bool:
        """Prove to node 0 that this node belongs to the run, and have it prove the same; False: try again."""
        sock.setblocking(False)
        made = self._loop.asyncio.create_connection(lambda: Connection(lambda _: self._loop.notice()), sock=sock)
        connection: Connection = self._loop.asyncio.run_until_complete(made)[1]
        try:
            opening = self._await_line(connection)
            handshake = NodeHandshake(self._secret.wait())
            connection.send_line(handshake.reply(opening or ""))
            answer = self._await_line(connection)
            if answer is not None and handshake.is_accepted(answer):
                connection.limit = MAX_BYTES
                self._connection = connection
                return True
        except ProtocolError as error:
            if version := str(error):
                msg = f"node 0 at {self._address} uses protocol {version}, and this node {PROTOCOL}"
                raise MachineError(msg, hint="install the same version everywhere") from None
            msg = f"what listens at {self._address} is not fsdplaunch launch"
            hint = "choose another port with main_process_port, the same on every node"
            raise MachineError(msg, hint=hint) from None
        connection.close()
        if answer is not None and not self._secret.may_change(waited):
            raise self._secret.refused(self._address)
        return False

    def _await_line(self, connection: Connection) -> str | None:
        """Wait for a line of the handshake; None when the other side says nothing, or has gone."""
        end = time.monotonic() + min(ANSWER_SECONDS, 2 * self._seconds)
        while not connection.lines and connection.open and (left := end - time.monotonic()) > 0:
            self._loop.turn(left)
        return text_of_line(connection.lines.popleft()) if connection.lines else None

    def join(self, node_info: NodeInfo, progress: JoinProgress, *, run_id: str = "") -> RunAssignment:
        """Present this node as one of a run (empty: of any), and wait until node 0 lets it go."""
        about = {"kind": "hello", "node": asdict(node_info), "run_id": run_id}
        self._connection.send(**about, time_ns=time.time_ns())
        has_heard = False
        try:
            while progress.seconds < self._seconds + ANSWER_SECONDS:
                for message in self._turn():
                    has_heard = True
                    if (done := self._negotiate(message, node_info, progress)) is not None:
                        self.assignment = done
                        return done
                if not self._connection.open and has_heard:
                    break
                if not self._connection.open:  # all were there, and about to start: it says more once they have
                    time.sleep(_RETRY_SECONDS)
                    self.connect(progress)
                    self._connection.send(**about, time_ns=time.time_ns())
        except ProtocolError:
            pass
        finally:
            progress.end()
        msg = f"node 0 at {self._address} left before the run started"
        raise MachineError(msg, hint="see its output")

    def _negotiate(self, message: Message, node_info: NodeInfo, progress: JoinProgress) -> RunAssignment | None:
        kind = message["kind"]
        if kind == "refused":
            raise MachineError(message["message"], hint=message["hint"] or None)
        if kind == "waiting":
            progress.show(f"{message['here']} of {message['of']} nodes have joined")
        if kind == "try":
            self._connection.send(kind="reached", why_not=obstacle_to(message["address"], message["port"]))
        if kind != "go":
            return None
        self._silence = float(message["silence"])
        return RunAssignment.from_message(
            message, store_host=self._place[0], address=node_info.address, secret=self._secret.wait()
        )

    def stop(self, number: int, count: int) -> None:
        """Have every node pass a signal on to its workers."""
        self._note_stop(number)
        self._loop.post(lambda: self._connection.send(kind="stop", number=number, count=count))

    def _note_stop(self, number: int) -> None:
        if number not in WARNINGS:
            self._stopped_by = self._stopped_by or signal_name(number)

    def conclude(self, outcome: Mapping[str, Any]) -> Message:
        """Report how this node's part ended, and return how the run ended."""
        self._reported = True
        self._loop.post(self._send_steps)
        self._loop.post(lambda: self._connection.send(kind="outcome", outcome=dict(outcome)))
        # After success the others may go on for as long as they like, and node 0 says when it is over.
        self._done.wait(None if outcome["status"] == 0 else self._grace + _FINAL_SECONDS)
        known = {name: outcome[name] for name in ("status", "stopped_by", "error")}
        return self._final or end_of_run(**known, cause=(outcome.get("attempt") or {}).get("cause"))

    def close(self) -> None:
        """Leave."""
        self._closing = True
        self._loop.post(lambda: None)

    def _listen(self) -> None:
        last_ping, last_steps, self._heard = 0.0, 0.0, time.monotonic()
        while not self._closing and not self._done.is_set():
            now = time.monotonic()  # what has come by now is read before node 0 counts as silent
            try:
                for message in self._turn():
                    self._obey(message)
            except ProtocolError:
                self._connection.close()
            if now - last_ping > min(2.0, self._silence / 4):
                last_ping = now
                self._connection.send(kind="ping")
            if now - last_steps > SEND_SECONDS and not self._reported:
                last_steps = now
                self._send_steps()
            if not self._done.is_set() and now - self._heard > self._silence:
                self._lose(f"no message for {self._silence:.0f} s")
            elif not self._done.is_set() and not self._connection.open:
                self._lose("its launcher is gone")

    def _send_steps(self) -> None:
        if rows := self.actions.steps():
            self._connection.send(kind="steps", ranks=rows)

    def _disconnect(self) -> None:
        self._connection.close()
        self._loop.close()

    def _lose(self, why: str) -> None:
        """End this node: without the coordinator there is no store, and nothing can go on.

        Where the run was asked to end, the coordinator's launcher may have been faster: what counts is how this
        node's workers end, for which they have their grace.
        """
        lost = f"lost the coordinator at {self._address}: {why}"
        if self._stopped_by:
            self._tell(f"{lost}, after {self._stopped_by}")
            later(self._grace, lambda: self.actions.end(True))
        else:
            self._final = end_of_run(EXIT_MACHINE, lost=[lost])
        self._done.set()
        if not self._reported and not self._stopped_by:
            self.actions.end(True)

    def _obey(self, message: Message) -> None:
        if message["kind"] == "stop":
            self._note_stop(message["number"])
            self.actions.stop(message["number"], message["count"])
        elif message["kind"] == "end":
            self.actions.end(message["at_once"])
        elif message["kind"] == "members":
            self.actions.change(message)
        elif message["kind"] == "final":
            self._final = message["final"]
            self._done.set()

    def _turn(self) -> list[Message]:
        """Wait for messages, and for what other threads post; return the messages."""
        lines = self._connection.lines
        if not lines:
            self._loop.turn(TURN_SECONDS)
        messages = [decode(lines.popleft(), TO_NODE) for _ in range(len(lines))]
        if messages:
            self._heard = time.monotonic()
        return messages
