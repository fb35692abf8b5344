"""Torch's elastic agent with our workers and our rendezvous: ranks, restarts and barriers are torch's.

Runs in the agent, after the fork server has been forked.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import (
    LogsDest,
    LogsSpecs,
    PContext,
    RunProcsResult,
    SignalException,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import config_from_args, parse_args

from fsdplaunch.agent.worker_group import WorkerGroup
from fsdplaunch.launch.coordination.network import answers, shorten_name_lookups
from fsdplaunch.run_dir import MEMBERSHIP, read_json
from fsdplaunch.run_secret import proof
from fsdplaunch.runtime.collectives.stores import HashStore, PrefixStore, Store, TCPStore, serving_store
from fsdplaunch.sockets import make_room

__all__ = ["ChildFailedError", "RendezvousError", "SignalException", "run_elastic"]

_NO_SECONDS = 1e-6
"""Torch refuses 0."""
AGREED_BACKEND = "fsdplaunch"
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 0.5
_STORE_CONNECTIONS = 1 << 16
"""Every agent and every worker of the run comes to node 0's store."""
_ASKED_PER_SECOND = 500
"""How often the agents of all nodes together may ask node 0 whether a new attempt has begun."""
_WAITING_PER_SECOND = 2000
"""How often they may ask together while all wait for the last one."""
_HOLD_SECONDS = 2.0
"""How long an end of workers is held back in an elastic run: a node that goes takes its peers' connections."""


class Members(NamedTuple):
    """Which nodes take part: how often that has changed, this one's place among them, and how many there are."""

    change: int
    place: int
    nodes: int


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
        """Wait until all keys are there."""
        seconds = (timeout or self._store.timeout).total_seconds()
        poll(lambda: bool(self._store.check(keys)), self._is_stopped, seconds, f"{keys} did not come", self._nodes)


def poll(
    condition: Callable[[], bool], is_stopped: Callable[[], None], seconds: float, why_not: str, nodes: int
) -> None:
    """Wait in Python, where a signal is handled; torch's own waiting would not notice one.

    A RendezvousTimeoutError, which `why_not` begins, says that it took longer. `is_stopped` raises when the run is
    to end. So many nodes wait, and all ask the same store.
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
    """Counts attempts, and has the nodes begin each one together.

    In an elastic run nodes come and go, and this node's launcher writes down which take part. When that changes,
    every node's workers start again, which counts as no failure. They are killed: their peers on a lost node will
    never answer, and those that left well after a signal on one node would look finished on another.
    """

    def __init__(
        self,
        *,
        run_id: str,
        rank: int = 0,
        nodes: int = 1,
        place: tuple[str, int] = ("127.0.0.1", 0),  # of node 0's store; port 0 for any on a lone node
        secret: str = "",
        held: socket.socket | None = None,  # on node 0, the socket that its launcher has bound there
        join_seconds: float = 300.0,  # how long the others may take to come
        read_seconds: float = 60.0,  # how long one call to the store may take
        is_stopped: Callable[[], None] = lambda: None,  # raises when the run is to end, while this node waits
        elastic: WorkerGroup | None = None,  # this node's workers, where other nodes may come and go
    ) -> None:
        """Begin before the first attempt, with what the launchers agreed on; a lone node has no secret."""
        self._run_id, self._rank, self._nodes, self._secret, self._held = run_id, rank, nodes, secret, held
        self._host, self._port = place
        self._join_seconds, self._read_timeout = join_seconds, timedelta(seconds=read_seconds)
        self._is_stopped, self._elastic = is_stopped, elastic
        self._members = Members(0, rank, nodes)
        self.held_since: float | None = None
        """When the present workers began to end, as far as that is held back."""
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
        """Begin an attempt with all nodes."""
        if self._nodes == 1 and self._elastic is None:
            self._attempt += 1
            return RendezvousInfo(HashStore(), 0, 1, self._serve(self._port))
        self._control = self._control or self._open()
        while True:  # until nobody has come or gone meanwhile
            found = self._meet(self._control)
            if found is not None:
                return found

    def _meet(self, control: Store) -> RendezvousInfo | None:
        """Wait for the nodes that take part now; None where others do before all are there."""
        if (now := self._members_now()) != self._members:
            self._members, self._attempt = now, -1
        change, place, nodes = self._members
        # Say that this attempt begins, unless another node has said so; a node that lags behind catches up.
        counted = PrefixStore(f"change{change}", control)
        self._attempt += 1
        counted.compare_set("attempt", str(self._attempt - 1) if self._attempt else "", str(self._attempt))
        self._attempt = max(self._attempt, self._current(control)) if self._attempt else 0
        store = PrefixStore(f"attempt{self._attempt}", counted)
        if place == 0:
            is_first = not change and not self._attempt
            own = RendezvousStoreInfo(self._host, self._port) if is_first else self._serve(0)
            store.set("port", str(own.master_port))
        if store.add("here", 1) == nodes:
            store.set("all", "here")

        def is_decided() -> bool:
            return bool(store.check(["all"])) or self._has_changed()

        def leave() -> None:
            self._is_stopped()
            if self._elastic is not None and self._elastic.is_done and self._has_changed():
                msg = "a node left while this one had already finished"  # it does not answer
                raise RendezvousError(msg)

        poll(is_decided, self._is_stopped, self._join_seconds, "not all nodes started the attempt", self._nodes)
        if not store.check(["all"]):
            return None
        watched: Any = _WatchedStore(store, leave, nodes)
        return RendezvousInfo(watched, place, nodes, RendezvousStoreInfo(self._host, int(store.get("port"))))

    def _members_now(self) -> Members:
        """Return which nodes take part now, as far as this node's launcher has written it down."""
        known = read_json(self._elastic.spec.run_dir / MEMBERSHIP) if self._elastic is not None else {}
        return Members(**known) if known else self._members

    def _has_changed(self) -> bool:
        """Return whether other nodes take part than those that this one's workers began with."""
        return self._members_now().change > self._members.change

    def holds(self) -> bool:
        """Return whether an end of workers may be a change's doing, which will be known in a moment."""
        if self._elastic is None:
            return False
        now = time.monotonic()
        self.held_since = now if self.held_since is None else self.held_since
        return self._has_changed() or now - self.held_since < _HOLD_SECONDS

    def _serve(self, port: int) -> RendezvousStoreInfo:
        """Open the store of one attempt; those before are closed."""
        del self._served[1 if self._control is not None else 0 :]
        try:
            store, port = serving_store(self._host, port, timeout=self._read_timeout)
        except OSError:  # somebody has taken it meanwhile
            store, port = serving_store(self._host, 0, timeout=self._read_timeout)
        self._served.append(store)
        return RendezvousStoreInfo(self._host, port)

    def _open(self) -> Store:
        shorten_name_lookups(self._host, os.environ)  # in this process: workers have variables of their own
        store: Store
        try:
            if self._rank == 0:
                make_room(_STORE_CONNECTIONS)
                store, _ = serving_store(self._host, self._port, timeout=self._read_timeout, held=self._held)
                self._served.append(store)
            else:
                reached, why_not = lambda: answers(self._host, self._port), "node 0's store did not open"
                poll(reached, self._is_stopped, self._join_seconds, why_not, self._nodes)
                store = TCPStore(self._host, self._port, None, False, self._read_timeout)
        except OSError as error:
            msg = f"the store cannot listen at {self._host}:{self._port}: {error.strerror}"
            raise RendezvousConnectionError(msg) from error
        except (RuntimeError, ValueError) as error:
            msg = f"the connection to the store at {self._host}:{self._port} failed"
            raise RendezvousConnectionError(msg) from error
        return PrefixStore(proof(self._secret, "agents", self._run_id), store)

    def _current(self, control: Store) -> int:
        """Return the attempt that has begun among the nodes that take part now."""
        text = PrefixStore(f"change{self._members.change}", control).get("attempt").decode(errors="replace")
        return int(text) if text.isdecimal() and len(text) < 9 else 0  # noqa: PLR2004  (a count)

    def num_nodes_waiting(self) -> int:
        """Return 1 when workers are to start again: another node has begun an attempt, or nodes come or go."""
        group = self._elastic
        # Workers that were asked to stop have their grace, whoever leaves meanwhile; others are killed.
        may_kill = group is not None and (group.stop.number is None or group.stop.is_warning)
        if group is not None and may_kill and self._has_changed():
            group.is_replaced = True
            group.send(signal.SIGKILL)
            return 1
        now = time.monotonic()
        if self._control is not None and now - self._asked > self._nodes / _ASKED_PER_SECOND:
            self._asked = now
            with suppress(RuntimeError, ValueError):  # node 0 has gone: its launcher, or ours, says so
                return int(self._current(self._control) > self._attempt)
        return 0

    def is_closed(self) -> bool:
        """Return False: the launchers end a run together."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def get_run_id(self) -> str:
        """Return the run's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close what was opened."""
        self._control = None
        self._served.clear()
        return True


class _RunFolderLogs(LogsSpecs):
    """Tells torch that there is nothing to redirect: the worker group does that."""

    def __init__(self, folder: str) -> None:
        super().__init__(log_dir=folder)
        self._folder = folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Give every stream "as it is"."""
        nothing = dict.fromkeys(range(len(envs)), "")
        return LogsDest(stdouts=nothing, stderrs=dict(nothing), error_files=dict(nothing))

    @property
    def root_log_dir(self) -> str:
        """Return where torch may say its logs are."""
        return self._folder


class _WorkerGroupContext(PContext):
    """The processes of one attempt, as torch's agent wants to see them.

    It does not install torch's signal handlers, which end everything on any signal; the agent has its own.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        name: str,
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        rendezvous: AgreedRendezvous,
    ) -> None:
        super().__init__(name, name, dict.fromkeys(envs, ()), envs, logs_specs)
        self._worker_group = worker_group
        self._rendezvous = rendezvous

    def start(self) -> None:
        """Start the workers, unless the run has been asked to stop meanwhile."""
        raise_if_stopped(self._worker_group)
        self._rendezvous.held_since = None
        self._worker_group.start(self.envs)

    _start = start  # torch's own `start` would call it

    def pids(self) -> dict[int, int]:
        """Return process ids by local rank."""
        return {worker.local_rank: worker.pid for worker in self._worker_group.workers}

    def _poll(self) -> RunProcsResult | None:
        # Torch's agent sleeps between two looks; here it waits, and an end of a worker wakes it.
        worker_group, stop = self._worker_group, self._worker_group.stop
        worker_group.look(worker_group.spec.launch.monitor_interval_seconds)
        if stop.number is not None:
            if stop.is_warning and stop.is_over and not stop.insisted and not worker_group.failed:
                stop.number = None  # a warning: the script has saved and gone on
                return self._outcome() if not worker_group.running else None
            if not worker_group.running or stop.insisted or stop.is_over:
                worker_group.finish(number=signal.SIGKILL)
                raise_if_stopped(worker_group)
            return None
        if not worker_group.failed and worker_group.running:
            return None
        return None if self._rendezvous.holds() else self._outcome()

    def _outcome(self) -> RunProcsResult:
        failed = {
            # Torch reads an error file by itself and stumbles over half a record; the worker group reads ours.
            worker.local_rank: ProcessFailure(
                local_rank=worker.local_rank, pid=worker.pid, exitcode=worker.ended.code, error_file=""
            )
            for worker in self._worker_group.failed
            if worker.ended is not None
        }
        self._worker_group.finish()
        return RunProcsResult(
            failures=failed, return_values=dict.fromkeys(self.pids()), stdouts=self.stdouts, stderrs=self.stderrs
        )

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:  # noqa: ARG002  (the worker group knows its own)
        self._worker_group.finish(number=death_sig)


def raise_if_stopped(worker_group: WorkerGroup) -> None:
    """Leave torch's loop when a signal has come and no worker is there to answer it."""
    number = worker_group.stop.number
    if number is not None:
        msg = f"stopped by signal {number}"
        raise SignalException(msg, signal.Signals(number))


def read_options(options: Sequence[str]) -> LaunchConfig:
    """Have torchrun's own parser read its options.

    It takes a PET_ variable for each one that is not given, which a cluster's operator sets for a bare torchrun.
    What they say has been decided by now; workers still see them.
    """
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]
    return config_from_args(parse_args([*options, "--no-python", "worker"]))[0]


def run_elastic(options: Sequence[str], worker_group: WorkerGroup, *, secret: str = "") -> None:
    """Run torch's agent with torchrun's options until the workers are done.

    Raises:
        ChildFailedError: Workers failed and no restart is left.
        SignalException: The run was stopped.
        RendezvousError: The nodes did not find each other.
    """
    config = read_options(options)
    config.monitor_interval = _NO_SECONDS
    config.logs_specs = _RunFolderLogs(str(worker_group.spec.run_dir))
    handler = _use_own_rendezvous(config, worker_group, secret)

    def start_processes(name: str, envs: dict[int, dict[str, str]], logs_specs: LogsSpecs, **_: Any) -> PContext:
        # Torch counts the failures of this node; workers of older torch share keys by it.
        envs = {rank: env | {"TORCHELASTIC_RESTART_COUNT": str(handler.attempt)} for rank, env in envs.items()}
        context = _WorkerGroupContext(worker_group, name, envs, logs_specs, handler)
        try:
            context.start()
        except BaseException:
            context.close()
            raise
        return context

    # Torch has no way to pass in another kind of process. The agent calls this function by its name in its own
    # module (torch 2.6 to 2.13 at least), so replacing that name leaves everything else of torch's as it is.
    setattr(local_elastic_agent, "start_processes", start_processes)  # noqa: B010  (its type is narrower)
    elastic_launch(config, "worker")()


def _use_own_rendezvous(config: LaunchConfig, worker_group: WorkerGroup, secret: str) -> AgreedRendezvous:
    """Put a rendezvous of ours in the place of torch's, which listens on all addresses and reads pickles."""
    host, _, port = config.rdzv_endpoint.rpartition(":")
    settings, spec = config.rdzv_configs, worker_group.spec
    rank = (spec.node or 0) if config.max_nodes > 1 else 0

    def leave_when_over() -> None:
        raise_if_stopped(worker_group)
        if worker_group.is_released:
            msg = "the run has ended on another node"
            raise RendezvousError(msg)

    handler = AgreedRendezvous(
        run_id=config.run_id,
        rank=rank,
        nodes=config.max_nodes,
        place=(host.removeprefix("[").removesuffix("]"), int(port)),
        secret=secret,
        held=spec.held,
        join_seconds=float(settings.get("join_timeout", settings.get("timeout", 300))),
        read_seconds=float(settings.get("read_timeout", 60)),
        is_stopped=leave_when_over,
        elastic=worker_group if config.max_nodes > config.min_nodes else None,
    )
    config.rdzv_backend = AGREED_BACKEND
    rendezvous_handler_registry.register(AGREED_BACKEND, lambda _params: handler)
    return handler
