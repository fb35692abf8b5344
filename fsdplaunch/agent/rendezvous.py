"""How the agents of a run begin each attempt together. Runs in the agent, with torch.

The launchers have numbered the nodes; in an elastic run node 0's launcher does so again when one comes or goes.
Here the attempts are counted. Torch's own ways are a state that every node rewrites as a pickle, in a store that
listens on all addresses (c10d), or a store that does not survive a restart (static). Here a lone node keeps all in
its own memory, and several meet at a store that listens on node 0's address, under keys that only the run knows;
what it holds are numbers.
"""

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from fsdplaunch.agent.worker_group import WorkerGroup
from fsdplaunch.launch.coordination.network import answers, shorten_name_lookups
from fsdplaunch.run_dir import MEMBERSHIP, read_json
from fsdplaunch.run_secret import proof
from fsdplaunch.runtime.collectives.stores import HashStore, PrefixStore, Store, TCPStore, serving_store
from fsdplaunch.sockets import make_room

AGREED_BACKEND = "fsdplaunch"
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 0.5
_STORE_CONNECTIONS = 1 << 16
"""Every agent and every worker of the run comes to node 0's store."""
_ASKED_PER_SECOND = 500
"""How often the agents of all nodes together may ask node 0 whether a new attempt has begun."""
_WAITING_PER_SECOND = 2000
"""How often they may ask together while all wait for the last one."""
_LOCAL = "127.0.0.1"
_HOLD_SECONDS = 2.0
"""How long an end of workers is held back in an elastic run: a node that goes takes its peers' connections."""


class Members(NamedTuple):
    """Which nodes take part: how often that has changed, this one's place among them, and how many there are."""

    change: int
    place: int
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedNodes:
    """What the launchers agreed on.

    Attributes:
        run_id: The run's name.
        rank: This node's.
        nodes: How many there are.
        host: Where node 0's store listens.
        port: Its port; 0 for any on a lone node.
        secret: The run's; empty on a lone node.
        held: On node 0, the socket that its launcher has bound there.
        join_seconds: How long the others may take to come.
        read_seconds: How long one call to the store may take.
    """

    run_id: str
    rank: int = 0
    nodes: int = 1
    host: str = _LOCAL
    port: int = 0
    secret: str = ""
    held: socket.socket | None = field(default=None, compare=False, repr=False)
    join_seconds: float = 300.0
    read_seconds: float = 60.0


class Membership:
    """Which nodes take part, as this node's launcher writes it down; in an elastic run that changes.

    When nodes come or go, every node's workers start again, and that counts as no failure. The workers are
    killed: their peers on a lost node will never answer, and those that left well after a signal on one node
    would look finished on another.
    """

    def __init__(self, worker_group: WorkerGroup, first: Members) -> None:
        self._worker_group, self._first = worker_group, first
        self.seen = first
        self._held_since: float | None = None

    def now(self) -> Members:
        """Return which nodes take part now."""
        known = read_json(self._worker_group.spec.run_dir / MEMBERSHIP)
        return Members(**known) if known else self._first

    def has_changed(self) -> bool:
        """Return whether other nodes take part than those that this one's workers began with."""
        return self.now().change > self.seen.change

    def begin(self) -> None:
        """Note that new workers start."""
        self._held_since = None

    def holds(self) -> bool:
        """Return whether an end of workers may be a change's doing, which will be known in a moment."""
        if self.has_changed():
            return True
        now = time.monotonic()
        self._held_since = now if self._held_since is None else self._held_since
        return now - self._held_since < _HOLD_SECONDS

    def is_to_start_again(self) -> bool:
        """Return whether the workers are to start again with other nodes; the present ones are killed then."""
        stop = self._worker_group.stop
        if (stop.number is not None and not stop.is_warning) or not self.has_changed():
            return False  # workers that were asked to stop have their grace, whoever leaves meanwhile
        self._worker_group.is_replaced = True
        self._worker_group.send(signal.SIGKILL)
        return True

    def leave_when_changed(self) -> None:
        """End a wait for the other nodes that begins when this one is done: one that has gone does not answer.

        Raises:
            RendezvousError: A node has gone since this one's workers began.
        """
        if self._worker_group.is_done and self.has_changed():
            msg = "a node has gone while this one was done"
            raise RendezvousError(msg)


class _WatchedStore:
    """A store whose waiting ends when the run is to end.

    Torch's agent waits in it, up to five minutes, until all nodes are done. Its own waiting notices no signal, so
    a node that is done would not hear that another one has failed.
    """

    def __init__(self, store: Store, is_stopped: Callable[[], None], nodes: int) -> None:
        self._store, self._is_stopped, self._nodes = store, is_stopped, nodes

    def __getattr__(self, name: str) -> Any:
        """Return what is not about waiting."""
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        """Return a value, once it is there."""
        self.wait([key])
        return bytes(self._store.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            RendezvousTimeoutError: They are not within the store's timeout.
        """
        seconds = (timeout or self._store.timeout).total_seconds()
        poll(lambda: bool(self._store.check(keys)), self._is_stopped, seconds, f"{keys} did not come", self._nodes)


def poll(
    condition: Callable[[], bool], is_stopped: Callable[[], None], seconds: float, why_not: str, nodes: int
) -> None:
    """Wait in Python, where a signal is handled; torch's own waiting would not notice one.

    Args:
        condition: What is waited for.
        is_stopped: Raises when the run is to end.
        seconds: How long to wait.
        why_not: Begins the message.
        nodes: How many wait: all ask the same store.

    Raises:
        RendezvousTimeoutError: It took longer.
    """
    start = time.monotonic()
    while not condition():
        is_stopped()
        waited = time.monotonic() - start
        if waited > seconds:
            msg = f"{why_not} within {seconds:.0f} s"
            raise RendezvousTimeoutError(msg)
        # Who has waited long may wait a tenth of that longer.
        pause = max(_PAUSE_SECONDS, nodes / _WAITING_PER_SECOND, waited / 10)
        time.sleep(min(pause, _LONGEST_PAUSE_SECONDS))


class AgreedRendezvous(RendezvousHandler):
    """Counts attempts, and has the nodes begin each one together."""

    def __init__(
        self,
        agreed: AgreedNodes,
        is_stopped: Callable[[], None] = lambda: None,
        membership: Membership | None = None,
    ) -> None:
        """Begin before the first attempt.

        Args:
            agreed: What the launchers agreed on.
            is_stopped: Raises when the run is to end; called while this node waits.
            membership: Which nodes take part, where that may change.
        """
        self._agreed, self._is_stopped, self.membership = agreed, is_stopped, membership
        self._members = membership.seen if membership is not None else Members(0, agreed.rank, agreed.nodes)
        self._control: Store | None = None
        self._served: list[Store] = []
        self._attempt = -1
        self._asked = 0.0

    @property
    def attempt(self) -> int:
        """Return how often workers have started before, the same on all nodes."""
        return self._members.change + self._attempt

    def get_backend(self) -> str:
        """Return the name under which torch's agent asks for this."""
        return AGREED_BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Return True: workers that make a group themselves are clients of a store of node 0's agent."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin an attempt with all nodes.

        Raises:
            RendezvousTimeoutError: Some did not come.
            RendezvousConnectionError: Node 0's store cannot be reached.
        """
        if self._agreed.nodes == 1 and self.membership is None:
            self._attempt += 1
            return RendezvousInfo(HashStore(), 0, 1, self._serve(self._agreed.port))
        self._control = self._control or self._open()
        while True:  # until nobody has come or gone meanwhile
            found = self._meet(self._control)
            if found is not None:
                return found

    def _meet(self, control: Store) -> RendezvousInfo | None:
        """Wait for the nodes that take part now; None where others do before all are there."""
        agreed, membership = self._agreed, self.membership
        if membership is not None:
            membership.seen = membership.now()
            if membership.seen.change != self._members.change:
                self._members, self._attempt = membership.seen, -1
        change, place, nodes = self._members
        counted = self._counted(control)
        self._attempt += 1
        self._raise_attempt(counted)
        store = PrefixStore(f"attempt{self._attempt}", counted)
        if place == 0:
            is_first = not change and not self._attempt
            own = RendezvousStoreInfo(agreed.host, agreed.port) if is_first else self._serve(0)
            store.set("port", str(own.master_port))
        if store.add("here", 1) == nodes:
            store.set("all", "here")

        def is_decided() -> bool:
            return bool(store.check(["all"])) or (membership is not None and membership.has_changed())

        self._wait_until(is_decided, "not all nodes began the attempt")
        if not store.check(["all"]):
            return None
        workers = RendezvousStoreInfo(agreed.host, int(store.get("port")))
        watched: Any = _WatchedStore(store, self._leave, nodes)
        return RendezvousInfo(watched, place, nodes, workers)

    def _leave(self) -> None:
        self._is_stopped()
        if self.membership is not None:
            self.membership.leave_when_changed()

    def _serve(self, port: int) -> RendezvousStoreInfo:
        """Open the store of one attempt; those before are closed."""
        seconds = timedelta(seconds=self._agreed.read_seconds)
        del self._served[1 if self._control is not None else 0 :]
        try:
            store, port = serving_store(self._agreed.host, port, timeout=seconds)
        except OSError:  # somebody has taken it meanwhile
            store, port = serving_store(self._agreed.host, 0, timeout=seconds)
        self._served.append(store)
        return RendezvousStoreInfo(self._agreed.host, port)

    def _open(self) -> Store:
        """Open node 0's store, or connect to it."""
        agreed, seconds = self._agreed, timedelta(seconds=self._agreed.read_seconds)
        shorten_name_lookups(agreed.host, os.environ)  # in this process: workers have variables of their own
        prefix = proof(agreed.secret, "agents", agreed.run_id)
        if agreed.rank == 0:
            make_room(_STORE_CONNECTIONS)
            try:
                store, _ = serving_store(agreed.host, agreed.port, timeout=seconds, held=agreed.held)
            except OSError as error:
                msg = f"the store cannot listen at {agreed.host}:{agreed.port}: {error.strerror}"
                raise RendezvousConnectionError(msg) from error
            self._served.append(store)
            return PrefixStore(prefix, store)
        self._wait_until(lambda: answers(agreed.host, agreed.port), "node 0's store did not open")
        try:
            return PrefixStore(prefix, TCPStore(agreed.host, agreed.port, None, False, seconds))
        except (RuntimeError, ValueError) as error:
            msg = f"the connection to the store at {agreed.host}:{agreed.port} failed"
            raise RendezvousConnectionError(msg) from error

    def _counted(self, control: Store) -> Store:
        """Return where the attempts of the nodes that take part now are counted."""
        return PrefixStore(f"change{self._members.change}", control)

    def _raise_attempt(self, counted: Store) -> None:
        """Say that this attempt begins, unless another node has said so; a node that lags behind catches up."""
        if self._attempt:
            counted.compare_set("attempt", str(self._attempt - 1), str(self._attempt))
            self._attempt = max(self._attempt, self._current(counted))
        else:
            counted.compare_set("attempt", "", "0")

    def _wait_until(self, condition: Callable[[], bool], why_not: str) -> None:
        poll(condition, self._is_stopped, self._agreed.join_seconds, why_not, self._agreed.nodes)

    @staticmethod
    def _current(counted: Store) -> int:
        text = counted.get("attempt").decode(errors="replace")
        return int(text) if text.isdecimal() and len(text) < 9 else 0  # noqa: PLR2004  (a count)

    def num_nodes_waiting(self) -> int:
        """Return 1 when workers are to start again: another node has begun an attempt, or nodes come or go."""
        if self.membership is not None and self.membership.is_to_start_again():
            return 1
        now = time.monotonic()
        if self._control is not None and now - self._asked > self._agreed.nodes / _ASKED_PER_SECOND:
            self._asked = now
            with suppress(RuntimeError, ValueError):  # node 0 has gone: its launcher, or ours, says so
                return int(self._current(self._counted(self._control)) > self._attempt)
        return 0

    def is_closed(self) -> bool:
        """Return False: the launchers end a run together."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the launchers end a run together."""

    def get_run_id(self) -> str:
        """Return the run's name."""
        return self._agreed.run_id

    def shutdown(self) -> bool:
        """Close what was opened."""
        self._control = None
        self._served.clear()
        return True
