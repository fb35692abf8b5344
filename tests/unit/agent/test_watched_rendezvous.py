"""The rendezvous of elastic runs: waiting ends once a node has gone or the run is over; a store for workers."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.utils import store as store_util

from fsdplaunch.agent import rendezvous
from fsdplaunch.agent.rendezvous import Membership, WatchedRendezvous
from fsdplaunch.agent.worker_group import StopRequest
from fsdplaunch.run_dir import MEMBERSHIP, write_json
from fsdplaunch.runtime.collectives.stores import HashStore, TCPStore


class Handler:
    """Stands for torch's: gives a store that all nodes meet in."""

    use_agent_store = False

    def __init__(self, rank: int = 0, store: Any = None) -> None:
        self.closed, self.rank, self.store = False, rank, store or HashStore()

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self.store, self.rank, 2, RendezvousStoreInfo("127.0.0.1", 1))

    def num_nodes_waiting(self) -> int:
        return 3

    def set_closed(self) -> None:
        self.closed = True

    def is_closed(self) -> bool:
        return self.closed

    def get_backend(self) -> str:
        return "c10d"

    def get_run_id(self) -> str:
        return "r"

    def shutdown(self) -> bool:
        return True


@pytest.fixture
def group(tmp_path) -> Any:
    return SimpleNamespace(is_done=True, spec=SimpleNamespace(run_dir=tmp_path))


def test_exit_barrier_ends_when_the_launcher_reports_a_lost_node(group, tmp_path):
    membership = Membership(group)
    found = WatchedRendezvous(Handler(), membership.leave_when_changed).next_rendezvous()
    threading.Timer(0.3, lambda: write_json(tmp_path / MEMBERSHIP, {"changes": 1})).start()
    start = time.monotonic()
    with pytest.raises(RendezvousError, match="a node has gone"):
        store_util.barrier(found.store, 2, "end", barrier_timeout=300)
    assert 0.25 < time.monotonic() - start < 5


def test_node_that_is_not_done_is_told_by_the_rendezvous_instead(group, tmp_path):
    write_json(tmp_path / MEMBERSHIP, {"changes": 1})
    group.is_done = False
    Membership(group).leave_when_changed()


@pytest.mark.parametrize(("number", "answer"), [(None, None), (15, 0), (10, 0)])
def test_store_that_has_gone_ends_no_workers_that_were_asked_to_stop(group, monkeypatch, number, answer):
    def ask(_handler: Any) -> int:
        raise RendezvousError

    handler = SimpleNamespace(num_nodes_waiting=ask)
    monkeypatch.setattr(rendezvous, "_Handler", handler)
    group.stop = StopRequest(30, number=number)
    Membership(group).watch()
    if answer is None:
        with pytest.raises(RendezvousError):
            handler.num_nodes_waiting(None)
    else:
        assert handler.num_nodes_waiting(None) == answer


def test_store_waits_as_torchs_does_where_nobody_has_gone(group):
    handler = Handler()
    watched = WatchedRendezvous(handler, Membership(group).leave_when_changed)
    found = watched.next_rendezvous()
    threading.Timer(0.2, lambda: found.store.set("k", "v")).start()
    assert found.store.get("k") == b"v"
    with pytest.raises(RendezvousError, match="did not come within 0 s"):
        found.store.wait(["never"], timedelta(seconds=0.1))
    assert (found.rank, found.world_size) == (0, 2)
    watched.set_closed()
    assert (watched.is_closed(), watched.num_nodes_waiting(), watched.get_backend()) == (True, 3, "c10d")
    assert (watched.get_run_id(), watched.shutdown(), watched.use_agent_store) == ("r", True, True)


def test_workers_of_all_nodes_get_the_port_of_a_store_that_is_there_in_each_attempt():
    first = Handler()
    ends = [WatchedRendezvous(handler, lambda: None) for handler in (first, Handler(1, first.store))]
    for attempt in range(2):
        first.store.set("fsdplaunch/workers-port", "1")  # of an attempt before; torch's store has none
        places = [end.next_rendezvous().bootstrap_store_info for end in ends]
        assert places[0] == places[1]
        assert places[0].master_port != 1
        client = TCPStore(places[1].master_addr, places[1].master_port, None, False, timedelta(seconds=5))
        assert not client.check(["attempt"])  # of the attempt before
        client.set("attempt", str(attempt))
