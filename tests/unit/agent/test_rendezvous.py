"""How nodes begin attempts together, with others when some come or go; waiting ends when the run does."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.utils import store as store_util

from fsdplaunch.agent.elastic_agent import AgreedRendezvous
from fsdplaunch.agent.worker_group import StopRequest
from fsdplaunch.run_dir import MEMBERSHIP, write_json
from fsdplaunch.runtime.collectives.stores import TCPStore
from fsdplaunch.sockets import held


class Node:
    """One node's agent, with a folder in which its launcher writes who takes part."""

    def __init__(self, folder: Any, rank: int, port: int, **more: Any) -> None:
        self.folder, self.sent = folder / f"host{rank}", []
        self.folder.mkdir()
        self.group: Any = SimpleNamespace(
            is_done=False,
            is_replaced=False,
            spec=SimpleNamespace(run_dir=self.folder),
            stop=StopRequest(30),
            send=self.sent.append,
        )
        self.change(0, rank, 2)
        more |= {"run_id": "r", "rank": rank, "nodes": 3, "place": ("127.0.0.1", port), "secret": "ab" * 32}
        self.rendezvous = AgreedRendezvous(**more, join_seconds=20, elastic=self.group)

    def change(self, change: int, place: int, nodes: int) -> None:
        write_json(self.folder / MEMBERSHIP, {"change": change, "place": place, "nodes": nodes})


@pytest.fixture
def nodes(tmp_path) -> list[Node]:
    """Three nodes, of which two take part."""
    socket = held("127.0.0.1")
    port = socket.getsockname()[1]
    return [Node(tmp_path, 0, port, held=socket), *(Node(tmp_path, rank, port) for rank in (1, 2))]


def meet(*nodes: Node) -> list[Any]:
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(lambda node: node.rendezvous.next_rendezvous(), nodes))


def test_nodes_begin_each_attempt_together_and_start_again_when_one_comes_or_goes(nodes):
    first, second, third = nodes
    seen = [meet(first, second), meet(first, second)]
    for number, node in enumerate(nodes):
        node.change(1, number, 3)
    assert [node.rendezvous.num_nodes_waiting() for node in (first, second)] == [1, 1]
    assert (first.sent, first.group.is_replaced) == ([9], True)
    seen.append(meet(*nodes))
    first.change(2, 0, 2), third.change(2, 1, 2)
    assert third.rendezvous.num_nodes_waiting() == 1
    seen.append(meet(first, third))
    assert [[(one.rank, one.world_size) for one in met] for met in seen] == [
        [(0, 2), (1, 2)],
        [(0, 2), (1, 2)],
        [(0, 3), (1, 3), (2, 3)],
        [(0, 2), (1, 2)],
    ]
    assert [node.rendezvous.attempt for node in (first, third)] == [2, 2]
    for met in seen:
        assert len({one.bootstrap_store_info.master_port for one in met}) == 1
    place = seen[-1][1].bootstrap_store_info
    TCPStore(place.master_addr, place.master_port, None, False, timedelta(seconds=5)).set("open", "1")


def test_change_while_nodes_wait_for_one_that_has_gone_is_heard(nodes):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(nodes[0].rendezvous.next_rendezvous)
        time.sleep(0.3)
        nodes[0].change(1, 0, 1)
        found = waiting.result(5)
    assert (found.rank, found.world_size) == (0, 1)


def test_node_that_is_done_waits_for_none_that_has_gone(nodes):
    found = meet(*nodes[:2])[0]
    nodes[0].group.is_done = True
    threading.Timer(0.3, lambda: nodes[0].change(1, 0, 1)).start()
    start = time.monotonic()
    with pytest.raises(RendezvousError, match="a node left while"):
        store_util.barrier(found.store, 2, "end", barrier_timeout=300)
    assert 0.25 < time.monotonic() - start < 5


@pytest.mark.parametrize(("number", "answer"), [(None, 1), (15, 0), (10, 1)])
def test_workers_that_were_asked_to_stop_keep_their_grace_whoever_leaves(nodes, number, answer):
    meet(*nodes[:2])
    nodes[0].change(1, 0, 1)
    nodes[0].group.stop.number = number
    assert nodes[0].rendezvous.num_nodes_waiting() == answer


def test_store_waits_as_torchs_does_where_nobody_has_gone(nodes):
    found = meet(*nodes[:2])[0]
    threading.Timer(0.2, lambda: found.store.set("k", "v")).start()
    assert found.store.get("k") == b"v"
    with pytest.raises(RendezvousError, match="did not come within 0 s"):
        found.store.wait(["never"], timedelta(seconds=0.1))
