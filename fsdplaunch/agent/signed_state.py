"""Torch's elastic rendezvous, whose state is a pickle in a store: read only where the run's secret has signed it.

The store listens on node 0's address, and the key of the state is one that only the run knows.
"""

import hmac
import socket
from collections.abc import Callable
from datetime import timedelta
from hashlib import sha256
from typing import Any

from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from fsdplaunch.agent.agreed_rendezvous import WatchedStore
from fsdplaunch.run_secret import proof
from fsdplaunch.runtime.collectives.stores import Store, TCPStore, serving_store

BACKEND = "fsdplaunch-elastic"
_PORT_KEY = "fsdplaunch/workers-port"
_MAC_BYTES = sha256().digest_size


class SignedBackend(C10dRendezvousBackend):
    """Signs the state that it writes, and hands on none that another has written."""

    def __init__(self, store: Any, run_id: str, secret: str) -> None:
        super().__init__(store, proof(secret, "elastic", run_id))
        self._signing_key = proof(secret, "state", run_id).encode()

    @property
    def name(self) -> str:
        """Return the name under which torch's agent asks for this."""
        return BACKEND

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


class WatchedRendezvous(RendezvousHandler):
    """Torch's dynamic rendezvous, but that waiting ends with the run and the workers' store is there at once.

    Torch names the workers a port that was free a moment ago, for the first worker to open.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        is_stopped: Callable[[], None],
        read_time: timedelta = timedelta(seconds=60),
    ) -> None:
        self._handler, self._is_stopped, self._read_time = handler, is_stopped, read_time
        self._served: Store | None = None

    @property
    def use_agent_store(self) -> bool:
        """Return True: workers that make a group themselves are clients of a store of the first node's agent."""
        return True

    def get_backend(self) -> str:
        """Return the name under which torch's agent asks for this."""
        return self._handler.get_backend()

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others, as torch does, wrap the store they meet in, and open the workers'."""
        found = self._handler.next_rendezvous()
        watched: Any = WatchedStore(found.store, self._is_stopped, found.world_size)
        place: Any = found.bootstrap_store_info
        if found.rank == 0:
            self._served = None  # of the attempt before
            self._served, port = serving_store(place.master_addr, 0, timeout=self._read_time)
            watched.set(_PORT_KEY, str(port))
        place = RendezvousStoreInfo(place.master_addr, int(watched.get(_PORT_KEY)))
        return RendezvousInfo(watched, found.rank, found.world_size, place)

    def is_closed(self) -> bool:
        """Return whether the nodes have ended the run."""
        return self._handler.is_closed()

    def set_closed(self) -> None:
        """Have the nodes end the run."""
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join."""
        return self._handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        """Return the run's name."""
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """Close what was opened."""
        self._served = None
        return self._handler.shutdown()


def elastic_rendezvous(
    params: RendezvousParameters,
    secret: str,
    is_stopped: Callable[[], None],
    held: socket.socket | None = None,
) -> RendezvousHandler:
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
        msg = (
            f"the store at {params.endpoint} cannot be {'opened' if params.get_as_bool('is_host') else 'reached'}"
        )
        raise RendezvousConnectionError(msg) from error
    handler = create_handler(store, SignedBackend(store, params.run_id, secret), params)
    return WatchedRendezvous(handler, is_stopped, seconds)
