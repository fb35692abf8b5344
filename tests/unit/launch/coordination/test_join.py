"""Nodes that join, as threads on loopback: who is let go, who is refused, what strangers can do."""

import json
import socket
import threading
import time
from collections.abc import Callable

import pytest

from fsdplaunch.errors import MachineError
from fsdplaunch.launch.coordination import coordinator, network, run_control
from fsdplaunch.launch.coordination.node_client import NodeClient
from fsdplaunch.launch.coordination.run_control import OwnPause, RunActions, RunAssignment
from tests.joining import Place, counter, make_client
from tests.unit.launch.conftest import make_worker


def wait_until(condition: Callable[[], object], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_all_nodes_agree_on_names_workers_and_numbers():
    place = Place(3)
    threads = [place.come(1, workers=2), place.come(2, workers=4, rank=1)]
    assignment = place.coordinator.gather(counter())
    for thread in threads:
        thread.join(10)
    assert assignment.world == 7
    assert [name.split()[0] for name in assignment.names] == ["host0", "host2", "host1"]
    others = {client.assignment.rank: client.assignment for client in place.ends}
    assert sorted(others) == [1, 2]
    assert all((other.nodes, other.world) == (3, 7) for other in others.values())
    assert all(other.names == assignment.names[:1] for other in others.values())  # as long for many as for two
    assert {other.store for other in others.values()} == {assignment.store}
    port = int(assignment.store.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):  # nobody takes it before the agent's store listens there
        network.listen("127.0.0.1", port)


def test_node_that_comes_too_late_is_turned_away():
    place = Place(2)
    first = place.come(1)
    place.coordinator.gather(counter())
    first.join(10)
    place.coordinator.start()
    late = place.come(2)
    late.join(10)
    assert "already runs r1 with 2 nodes" in str(place.ends[-1])


@pytest.mark.parametrize("most", [2, 3])
def test_node_that_comes_while_the_others_try_each_other_waits_for_the_start(monkeypatch, most):
    tried = coordinator.try_to_reach

    def try_once_a_third_has_come(nodes: list) -> list[str]:
        place.come(2)
        deadline = time.monotonic() + 10
        while not place.coordinator._server._late and time.monotonic() < deadline:
            time.sleep(0.01)
        return tried(nodes)

    monkeypatch.setattr(coordinator, "try_to_reach", try_once_a_third_has_come)
    place = Place(2, most=most)
    place.come(1)
    assert place.coordinator.gather(counter()).nodes == 2
    place.coordinator.start()
    deadline = time.monotonic() + 10
    while len(place.ends) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    place.close()
    begun = sorted(
        (end.assignment.rank, end.assignment.nodes) for end in place.ends if isinstance(end, NodeClient)
    )
    refused = [end.message for end in place.ends if isinstance(end, MachineError)]
    if most == 2:
        assert begun == [(1, 2)]
        assert len(refused) == 1
        assert "already runs r1 with 2 nodes" in refused[0]
    else:
        assert (begun, refused) == ([(1, 2), (2, 3)], [])


def test_node_that_leaves_while_the_others_try_each_other_is_missed(monkeypatch):
    tried = coordinator.try_to_reach

    def try_once_it_has_left(nodes: list) -> list[str]:
        client._connection.close()
        deadline = time.monotonic() + 10
        while len(place.coordinator._server.present) > 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return tried(nodes)

    def come_and_say_nothing_more() -> None:
        client.connect(counter())
        about = {"node": place.node_info(2).to_message(), "time_ns": time.time_ns(), "run_id": ""}
        client._connection.send(kind="hello", **about)

    place = Place(3)
    client = place.client()
    monkeypatch.setattr(coordinator, "try_to_reach", try_once_it_has_left)
    threading.Thread(target=come_and_say_nothing_more, daemon=True).start()
    first = place.come(1)
    with pytest.raises(MachineError, match=r"host2 \(127.0.0.1\) did not answer any more"):
        place.coordinator.gather(counter())
    first.join(10)
    place.close()


def test_elastic_run_starts_with_the_least_and_takes_in_more_each_with_its_own_number():
    place = Place(2, most=4, grace=1)
    place.come(1, rank=2).join(0)
    assignment = place.coordinator.gather(counter())
    assert [name.split()[0] for name in assignment.names] == ["host0", "host1"]
    place.coordinator.start()
    for number, change in ((2, {"rank": 2}), (2, {"rank": 3}), (3, {})):
        place.come(number, **change).join(10)
    refused = [one.message for one in place.ends if isinstance(one, MachineError)]
    assert refused == ["host1 (127.0.0.1) already is node 2"]
    assert [one.assignment.rank for one in place.ends if isinstance(one, NodeClient)] == [2, 3, 1]
    assert any("host2" in line and "joins as node 3" in line for line in place.told)


def test_wait_is_counted_and_ends_in_time():
    said: list[str] = []
    place = Place(3, seconds=1.5)
    place.come(1)
    with pytest.raises(MachineError, match=r"2 of 3 nodes came within 2 s.*missing: node 2"):
        place.coordinator.gather(counter(said))
    assert any(line.startswith("2 of 3 nodes here") for line in said)


def test_node_client_that_cannot_reach_anybody_names_the_reason():
    with network.listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    client = make_client(port, seconds=0.5)
    with pytest.raises(MachineError, match=f"127.0.0.1:{port} within 0 s: connection refused"):
        client.connect(counter())


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"\x00\x01\x02\n",
        b"[]\n",
        b'{"kind": "stop", "number": 9, "count": 1}\n',
        b'{"kind": "hello"}\n',
        json.dumps({"kind": "hello", "node": 3}).encode() + b"\n",
    ],
)
def test_stranger_has_no_say_and_does_no_harm(words: bytes):
    place = Place(2)
    stopped: list[int] = []
    place.coordinator.actions = RunActions(stop=lambda number, _count: stopped.append(number))
    with socket.create_connection(("127.0.0.1", place.port)) as stranger:
        stranger.sendall(words)
        place.come(1)
        assert isinstance(place.coordinator.gather(counter()), RunAssignment)
    assert stopped == []


def test_signal_outcome_and_end_go_through():
    place = Place(2)
    place.come(1)
    place.coordinator.gather(counter())
    deadline = time.monotonic() + 10
    while not place.ends and time.monotonic() < deadline:
        time.sleep(0.02)
    (client,) = place.ends
    got: list[tuple[int, int]] = []
    client.actions = RunActions(stop=lambda number, count: got.append((number, count)))
    place.coordinator.start()
    client.start()
    place.coordinator.stop(15, 1)
    while not got and time.monotonic() < deadline:
        time.sleep(0.02)
    assert got == [(15, 1)]
    outcome = {"status": 75, "stopped_by": "SIGTERM", "error": None, "attempt": None}
    final: list[dict] = []
    threading.Thread(target=lambda: final.append(client.conclude(outcome)), daemon=True).start()
    assert place.coordinator.conclude(outcome)["status"] == 75
    while not final and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (final[0]["status"], final[0]["stopped_by"]) == (75, "SIGTERM")
    place.coordinator.close()
    client.close()


def test_silent_node_is_lost_and_ends_the_run():
    place = Place(2, silence=0.5)
    place.come(1)
    place.coordinator.gather(counter())
    ended: list[bool] = []
    place.coordinator.actions = RunActions(end=ended.append)
    place.coordinator.start()  # the node never starts to speak
    deadline = time.monotonic() + 10
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended == [True]
    outcome = {"status": 143, "stopped_by": "SIGTERM", "error": None, "attempt": None}
    final = place.coordinator.conclude(outcome)
    place.close()
    assert final["status"] == 3
    assert "lost host1 (127.0.0.1): no message for" in final["lost"][0]


@pytest.mark.parametrize("most", [2, 3])
@pytest.mark.parametrize(("number", "status"), [(15, 75), (10, 3)])
def test_node_that_goes_once_the_run_was_asked_to_end_is_no_failure(number, status, most):
    place = Place(2, most=most, silence=0.5)
    place.come(1)
    place.coordinator.gather(counter())
    ended: list[bool] = []
    place.coordinator.actions = RunActions(end=ended.append, change=lambda: ended.append(False))
    place.coordinator.start()  # the node never starts to speak
    place.coordinator.stop(number, 1)
    wait_until(lambda: ended or any("after SIG" in line for line in place.told))
    outcome = {"status": 75, "stopped_by": "SIGTERM", "error": None, "attempt": None}
    final = place.coordinator.conclude(outcome)
    place.close()
    assert (ended == [], most == 3 or final["status"] == status) == (number == 15, True)
    assert any("lost host1 (127.0.0.1): no message for" in line for line in [*place.told, *final["lost"]])


def test_nobody_counts_as_silent_before_what_came_in_a_pause_of_this_process_is_read(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(run_control.time, "monotonic", lambda: clock[0])
    pause, seen = OwnPause(1.5), []
    for seconds in (0.5, 9.0, 0.5, 9.0, 9.0, 9.0):  # always busy: then it has to judge all the same
        clock[0] += seconds
        seen.append(pause.has_just_ended())
    assert seen == [False, True, False, True, False, True]


@pytest.mark.parametrize(("number", "status"), [(15, 75), (10, 3)])
def test_node_whose_coordinator_goes_ends_as_it_was_asked_to(number, status):
    place = Place(2)
    place.come(1)
    place.coordinator.gather(counter())
    wait_until(lambda: place.ends)
    (client,) = place.ends
    ended: list[bool] = []
    client.actions = RunActions(end=ended.append)
    client.start()
    client.stop(number, 1)
    place.coordinator._server.shut()
    wait_until(client._done.is_set)
    assert ended == ([] if number == 15 else [True])
    outcome = {"status": 75, "stopped_by": "SIGTERM", "error": None, "attempt": None}
    assert client.conclude(outcome)["status"] == status
    place.close()


@pytest.mark.parametrize(("silence", "says"), [(0.5, "no message for"), (60, "it did not report how it ended")])
def test_node_that_is_lost_after_the_workers_blamed_its_connection_is_the_cause(monkeypatch, silence, says):
    monkeypatch.setattr(coordinator, "LINGER_SECONDS", 1.0)
    place = Place(2, silence=silence, grace=0.5)
    place.come(1)
    place.coordinator.gather(counter())
    place.coordinator.start()  # the node never starts to speak
    blames = make_worker(0, code=1, message="RuntimeError: Connection closed by peer [10.0.0.2]")
    attempt = {"attempt": 0, "started_ns": 0, "ended_ns": 1, "workers": [blames], "cause": blames}
    final = place.coordinator.conclude({"status": 1, "stopped_by": None, "error": None, "attempt": attempt})
    place.coordinator.close()
    assert final["status"] == 3
    assert f"lost host1 (127.0.0.1): {says}" in final["lost"][0]
