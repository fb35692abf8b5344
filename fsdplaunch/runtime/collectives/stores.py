"""The stores that processes of a run meet in: on one address only, or in a file that only this user can open."""

import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from fsdplaunch.run_secret import STORE_FILE, STORE_KEY
from fsdplaunch.sockets import bound, listening

__all__ = ["HashStore", "PrefixStore", "TCPStore"]  # mypy does not find them where torch has them
Store = Any


def serving_store(
    host: str, port: int, *, timeout: timedelta, held: socket.socket | None = None
) -> tuple[Store, int]:
    """Start a store that listens on one address, and return it with its port. Torch's own listens on all.

    Where the host is not this node's (behind address translation) it listens on all, too. Port 0 is any that is
    free. A socket that has been `held` for it, in the place of both, is then the store's.
    """
    listener = bound(host, port) if held is None else held
    try:
        address, port = listening(listener)
    except OSError:
        listener.close()
        raise
    store = TCPStore(
        address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def group_store(environ: Mapping[str, str], *, rank: int, size: int, timeout: timedelta) -> Store | None:
    """Return the store for the workers' process group; None where only torch's own way (`env://`) is open.

    On one node it is a file in a folder of this user's. On several it is the run's store, where the workers' keys
    begin with what only they know.
    """
    if path := environ.get(STORE_FILE):
        store = FileStore(path, size)
        store.set_timeout(timeout)
        return store
    if (key := environ.get(STORE_KEY)) and "MASTER_ADDR" in environ:
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        if rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return PrefixStore(key, serving_store(host, port, timeout=timeout)[0])
        return PrefixStore(key, TCPStore(host, port, None, False, timeout))
    return None
