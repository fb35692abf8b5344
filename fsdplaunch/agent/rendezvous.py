"""How the agents of a run begin each attempt together. Runs in the agent, with torch.

For a fixed number of nodes the launchers have numbered them already: attempts are counted. Torch's own ways are a
state that every node rewrites as a pickle, in a store that listens on all addresses (c10d), or a store that does
not survive a restart (static). Here one node keeps everything in its own memory, and several meet at a store that
listens on node 0's address, under keys that only the run knows; what it holds are numbers.

Where the number may change it is torch's elastic rendezvous, whose state is a pickle in that store: it is read
only where the run's secret has signed it.
"""

import hmac
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import Any

from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from fsdplaunch.agent.worker_group import WorkerGroup
from fsdplaunch.launch.coordination.network import answers, shorten_name_lookups
from fsdplaunch.run_dir import MEMBERSHIP, read_json
from fsdplaunch.run_secret import proof
from fsdplaunch.runtime.collectives.stores import HashStore, PrefixStore, Store, TCPStore, serving_store
from fsdplaunch.runtime.torch_internals.elastic import node_description_class, set_node_descriptions
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
ELASTIC_BACKEND = "fsdplaunch-elastic"
_PORT_KEY = "fsdplaunch/workers-port"
_MAC_BYTES = sha256().digest_size
_HOLD_SECONDS = 2.0
"""How long an end of workers is held back in an elastic run: a node that goes takes its peers' connections."""
_Node: Any = node_description_class() or object
_Handler: Any = DynamicRendezvousHandler


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

    def __init__(self, agreed: AgreedNodes, is_stopped: Callable[[], None] = lambda: None) -> None:
        """Begin before the first attempt.

        Args:
            agreed: What the launchers agreed on.
            is_stopped: Raises when the run is to end; called while this node waits.
        """
        self._agreed, self._is_stopped = agreed, is_stopped
        self._control: Store | None = None
        self._served: list[Store] = []
        self.attempt = -1
        self._asked = 0.0

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
        self.attempt += 1
        agreed = self._agreed
        if agreed.nodes == 1:
            return RendezvousInfo(HashStore(), 0, 1, self._serve(agreed.port))
        control = self._control = self._control or self._open()
        self._raise_attempt(control)
        store = PrefixStore(f"attempt{self.attempt}", control)
        if agreed.rank == 0:
            place = self._serve(0) if self.attempt else RendezvousStoreInfo(agreed.host, agreed.port)
            store.set("port", str(place.master_port))
        if store.add("here", 1) == agreed.nodes:
            store.set("all", "here")
        self._wait_until(lambda: bool(store.check(["all"])), "not all nodes began the attempt")
        place = RendezvousStoreInfo(agreed.host, int(store.get("port")))
        watched: Any = _WatchedStore(store, self._is_stopped, agreed.nodes)
        return RendezvousInfo(watched, agreed.rank, agreed.nodes, place)

    def _serve(self, port: int) -> RendezvousStoreInfo:
        """Open the store of one attempt; those before are closed."""
        seconds = timedelta(seconds=self._agreed.read_seconds)
        del self._served[1 if self._agreed.nodes > 1 else 0 :]
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

    def _raise_attempt(self, control: Store) -> None:
        """Say that this attempt begins, unless another node has said so; a node that lags behind catches up."""
        if self.attempt:
            control.compare_set("attempt", str(self.attempt - 1), str(self.attempt))
            self.attempt = max(self.attempt, self._current(control))
        else:
            control.compare_set("attempt", "", "0")

    def _wait_until(self, condition: Callable[[], bool], why_not: str) -> None:
        poll(condition, self._is_stopped, self._agreed.join_seconds, why_not, self._agreed.nodes)

    @staticmethod
    def _current(control: Store) -> int:
        text = control.get("attempt").decode(errors="replace")
        return int(text) if text.isdecimal() and len(text) < 9 else 0  # noqa: PLR2004  (a count)

    def num_nodes_waiting(self) -> int:
        """Return 1 when another node has begun a new attempt: this one's workers are then started again."""
        now = time.monotonic()
        if self._control is not None and now - self._asked > self._agreed.nodes / _ASKED_PER_SECOND:
            self._asked = now
            with suppress(RuntimeError, ValueError):  # node 0 has gone: its launcher, or ours, says so
                return int(self._current(self._control) > self.attempt)
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


class SignedBackend(C10dRendezvousBackend):
    """Signs the state that it writes, and hands on none that another has written."""

    def __init__(self, store: Any, run_id: str, secret: str) -> None:
        super().__init__(store, proof(secret, "elastic", run_id))
        self._signing_key = proof(secret, "state", run_id).encode()

    @property
    def name(self) -> str:
        """Return the name under which torch's agent asks for this."""
        return ELASTIC_BACKEND

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state and its token.

        Raises:
            RendezvousStateError: Somebody else has written it.
        """
        found = super().get_state()
        return None if found is None else (self._opened(found[0]), found[1])

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Write a state, signed; return what stands there then.

        Raises:
            RendezvousStateError: Somebody else has written it.
        """
        if token and not isinstance(token, bytes):
            current = self.get_state()
            return None if current is None else (*current, False)
        found = super().set_state(self._mac(state) + state, token)
        return None if found is None else (self._opened(found[0]), found[1], found[2])

    def _mac(self, state: bytes) -> bytes:
        return hmac.new(self._signing_key, state, sha256).digest()

    def _opened(self, signed: bytes) -> bytes:
        mac, state = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(state)):
            msg = "the state of the rendezvous is not signed with the run's secret: somebody else wrote it"
            raise RendezvousStateError(msg)
        return state


class WatchedRendezvous:
    """Torch's dynamic rendezvous, but waiting ends with the run and the workers' store is there at once.

    Torch names the workers a port that was free a moment ago, for the first worker to open.
    """

    use_agent_store = True  # workers that make a group themselves are clients of a store of the first node's agent

    def __init__(
        self,
        handler: RendezvousHandler,
        is_stopped: Callable[[], None],
        read_time: timedelta = timedelta(seconds=60),
    ) -> None:
        self._handler, self._is_stopped, self._read_time = handler, is_stopped, read_time
        self._served: Store | None = None

    def __getattr__(self, name: str) -> Any:
        """Return what is torch's own."""
        return getattr(self._handler, name)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others, as torch does, wrap the store they meet in, and open the workers'."""
        found = self._handler.next_rendezvous()
        watched: Any = _WatchedStore(found.store, self._is_stopped, found.world_size)
        place: Any = found.bootstrap_store_info
        if found.rank == 0:
            self._served = None  # of the attempt before
            self._served, port = serving_store(place.master_addr, 0, timeout=self._read_time)
            watched.set(_PORT_KEY, str(port))
        place = RendezvousStoreInfo(place.master_addr, int(watched.get(_PORT_KEY)))
        return RendezvousInfo(watched, found.rank, found.world_size, place)

    def shutdown(self) -> bool:
        """Close what was opened."""
        self._served = None
        return self._handler.shutdown()


def elastic_rendezvous(
    params: RendezvousParameters,
    secret: str,
    is_stopped: Callable[[], None],
    held: socket.socket | None = None,
) -> Any:
    """Return torch's dynamic rendezvous over a signed state.

    Args:
        params: As torch's agent has them.
        secret: The run's.
        is_stopped: Raises when the run is to end; called while this node waits for others that may be gone.
        held: On node 0, the socket that its launcher has bound there.

    Raises:
        RendezvousConnectionError: Node 0's store cannot be reached, or cannot listen.
    """
    host, _, port = params.endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    seconds = timedelta(seconds=int(params.get("read_timeout", "60")))
    try:
        if params.get_as_bool("is_host"):
            store = serving_store(host, int(port), timeout=seconds, held=held)[0]
        else:
            store = TCPStore(host, int(port), None, False, seconds)
    except (OSError, RuntimeError, ValueError) as error:
        msg = f"the store at {params.endpoint} cannot be opened, or reached"
        raise RendezvousConnectionError(msg) from error
    handler = create_handler(store, SignedBackend(store, params.run_id, secret), params)
    return WatchedRendezvous(handler, is_stopped, seconds)


class _NumberedNode(_Node):  # type: ignore[misc]
    """A node that sorts by its number; torch sorts by the text of the address, where 10.0.0.10 < 10.0.0.2.

    Ranks follow that order, so rank 0 runs on node 0, and neighbouring ranks on neighbouring nodes.
    """

    def __lt__(self, other: Any) -> bool:
        """Sort lower ranks first; the rank is kept in `local_id`."""
        return bool((self.local_id, self.addr, self.pid) < (other.local_id, other.addr, other.pid))


class _Numbering:
    """Stands in for torch's generator of node descriptions."""

    def __init__(self, number: int) -> None:
        self._number = number

    def generate(self, local_addr: str | None = None) -> Any:
        """Describe this node."""
        return _NumberedNode(local_addr or socket.getfqdn(), os.getpid(), self._number)


def order_nodes(number: int | None) -> None:
    """Have the rendezvous rank this node by its number.

    Args:
        number: None leaves the order to torch.
    """
    if number is not None and _Node is not object:
        set_node_descriptions(_Numbering(number))


class Membership:
    """Whether the nodes that take part are changing; only elastic runs, whose nodes may, have one.

    When nodes come or go, every node's workers start again, and that counts as no failure. The workers are
    killed: their peers on a lost node will never answer, and those that left well after a signal on one node
    would look finished on another.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self._seen = 0
        self._held_since: float | None = None

    def begin(self) -> None:
        """Note that new workers start."""
        self._held_since = None

    def holds(self) -> bool:
        """Return whether an end of workers may be a change's doing, which will be known in a moment."""
        if self._reported() > self._seen:
            return True
        now = time.monotonic()
        self._held_since = now if self._held_since is None else self._held_since
        return now - self._held_since < _HOLD_SECONDS

    def watch(self) -> None:
        """Have torch's agent start the workers again when the launcher reports a lost node.

        The agent asks the rendezvous, at every look at its workers, how many nodes wait to join.
        """
        ask = _Handler.num_nodes_waiting

        def num_nodes_waiting(handler: Any) -> int:
            stop, reported = self._worker_group.stop, self._reported()
            if stop.number is not None and not stop.is_warning:
                return 0  # the workers have their grace, whoever leaves meanwhile
            try:
                waiting = 1 if reported > self._seen else int(ask(handler))
            except RendezvousError:
                if stop.number is None:
                    raise
                return 0  # node 0's workers have ended before, and its store with them
            if waiting:
                self._seen, self._held_since = reported, None
                self._worker_group.is_replaced = True
                self._worker_group.send(signal.SIGKILL)
            return waiting

        _Handler.num_nodes_waiting = num_nodes_waiting

    def leave_when_changed(self) -> None:
        """End a wait for the other nodes that begins when this one is done: one that has gone does not answer.

        Raises:
            RendezvousError: The launcher has seen a node go since this one's workers began.
        """
        if self._worker_group.is_done and self._reported() > self._seen:
            msg = "a node has gone while this one was done"
            raise RendezvousError(msg)

    def _reported(self) -> int:
        """Return how often the launcher has seen a node go."""
        return int(read_json(self._worker_group.spec.run_dir / MEMBERSHIP).get("changes", 0))
