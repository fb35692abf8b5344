"""Nodes that join, as threads on loopback: who is let go, who is refused, what strangers can do."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest

from fsdplaunch.errors import MachineError
from fsdplaunch.launch.coordination import coordinator, network
from fsdplaunch.launch.coordination.node_client import NodeClient
from fsdplaunch.launch.coordination.protocol import Connection
from fsdplaunch.launch.coordination.run_control import RunActions
from tests.joining import Place, counter, make_client
from tests.unit.launch.conftest import make_worker

SAVED = {"status": 75, "stopped_by": "SIGTERM", "error": None, "attempt": None}


def wait_until(condition: Callable[[], object], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


@pytest.fixture
def place() -> Iterator[Callable[..., Place]]:
    """Makes a coordinator; closes it at the end."""
    made: list[Place] = []

    def make(*numbers: int, **more) -> Place:
        made.append(Place(*numbers, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def joined(place: Place) -> NodeClient:
    """Have a second node join; return it."""
    place.come(1)
    place.coordinator.gather(counter())
    wait_until(lambda: place.ends)
    (client,) = place.ends
    return client


def test_all_nodes_agree_on_names_workers_and_numbers(place):
    run = place(3)
    threads = [run.come(1, workers=2), run.come(2, workers=4, rank=1)]
    assignment = run.coordinator.gather(counter())
    for thread in threads:
        thread.join(10)
    assert assignment.world == 7
    assert [name.split()[0] for name in assignment.names] == ["host0", "host2", "host1"]
    others = {client.assignment.rank: client.assignment for client in run.ends}
    assert sorted(others) == [1, 2]
    assert all((other.nodes, other.world) == (3, 7) for other in others.values())
    assert all(other.names == assignment.names[:1] for other in others.values())  # as long for many as for two
    assert {other.store for other in others.values()} == {assignment.store}
    port = int(assignment.store.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):  # nobody takes it before the agent's store listens there
        network.listen("127.0.0.1", port)


@pytest.mark.parametrize("most", [2, 3])
def test_node_that_comes_while_the_others_try_each_other_comes_again(monkeypatch, place, most):
    run, tried, sent = place(2, most=most), coordinator.obstacle_to, Connection.send
    hellos: list[dict] = []

    def send(connection: Connection, **message) -> None:
        hellos.extend([message] if message["kind"] == "hello" else [])
        sent(connection, **message)

    def try_once_a_third_has_come(*place: object) -> str:
        run.come(2)
        wait_until(lambda: len(hellos) > 1)
        return tried(*place)

    monkeypatch.setattr(Connection, "send", send)
    monkeypatch.setattr(coordinator, "obstacle_to", try_once_a_third_has_come)
    run.come(1)
    assert run.coordinator.gather(counter()).nodes == 2
    run.coordinator.start()
    wait_until(lambda: len(run.ends) == 2)
    begun = sorted((end.assignment.rank, end.assignment.nodes) for end in run.ends if isinstance(end, NodeClient))
    refused = [end.message for end in run.ends if isinstance(end, MachineError)]
    if most == 2:
        assert begun == [(1, 2)]
        assert refused == ["host0 (127.0.0.1) already runs r1 with 2 nodes"]
    else:
        assert (begun, refused) == ([(1, 2), (2, 3)], [])


def test_node_that_leaves_while_the_others_try_each_other_is_missed(monkeypatch, place):
    run, tried = place(3), coordinator.obstacle_to
    client = run.client()

    def try_once_it_has_left(*place: object) -> str:
        client._connection.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        wait_until(lambda: len(run.coordinator.present) == 2)
        return tried(*place)

    def come_and_say_nothing_more() -> None:
        client.connect(counter())
        about = {"node": asdict(run.node_info(2)), "time_ns": time.time_ns(), "run_id": ""}
        client._connection.send(kind="hello", **about)

    monkeypatch.setattr(coordinator, "obstacle_to", try_once_it_has_left)
    monkeypatch.setattr(coordinator, "_REACH_SECONDS", 2.0)
    threading.Thread(target=come_and_say_nothing_more, daemon=True).start()
    first = run.come(1)
    with pytest.raises(MachineError, match=r"host2 \(127.0.0.1\) stopped answering"):
        run.coordinator.gather(counter())
    first.join(10)


def test_elastic_run_starts_with_the_least_and_takes_in_more_each_with_its_own_number(place):
    run = place(2, most=4, grace=1)
    run.come(1, rank=2).join(0)
    assignment = run.coordinator.gather(counter())
    assert [name.split()[0] for name in assignment.names] == ["host0", "host1"]
    run.coordinator.start()
    for number, change in ((2, {"rank": 2}), (2, {"rank": 3}), (3, {})):
        run.come(number, **change).join(10)
    refused = [one.message for one in run.ends if isinstance(one, MachineError)]
    assert refused == ["host1 (127.0.0.1) already is node 2"]
    assert [one.assignment.rank for one in run.ends if isinstance(one, NodeClient)] == [2, 3, 1]
    assert any("host2" in line and "joins as node 3" in line for line in run.told)


def test_wait_is_counted_and_ends_in_time(place):
    said: list[str] = []
    run = place(3, seconds=1.5)
    other = run.come(1)
    with pytest.raises(MachineError, match=r"2 of 3 nodes joined within 2 s.*missing: node 2") as refused:
        run.coordinator.gather(counter(said))
    other.join(10)
    assert run.ends[0].message == refused.value.message  # every one that came is told
    assert any(line.startswith("2 of 3 nodes have joined") for line in said)


def test_node_client_that_cannot_reach_anybody_names_the_reason():
    with network.listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    client = make_client(port, seconds=0.5)
    with pytest.raises(MachineError, match=f"127.0.0.1:{port} within 0 s: connection refused"):
        client.connect(counter())


def test_signal_outcome_and_end_go_through(place):
    run = place(2)
    client = joined(run)
    got: list[tuple[int, int]] = []
    final: list[dict] = []
    client.actions = RunActions(stop=lambda number, count: got.append((number, count)))
    run.coordinator.start()
    client.start()
    run.coordinator.stop(15, 1)
    wait_until(lambda: got == [(15, 1)])
    threading.Thread(target=lambda: final.append(client.conclude(SAVED)), daemon=True).start()
    assert run.coordinator.conclude(SAVED)["status"] == 75
    wait_until(lambda: final)
    assert (final[0]["status"], final[0]["stopped_by"]) == (75, "SIGTERM")


@pytest.mark.parametrize("most", [2, 3])
@pytest.mark.parametrize(("number", "status"), [(15, 75), (10, 3)])
def test_node_that_goes_once_the_run_was_asked_to_end_is_no_failure(place, number, status, most):
    run = place(2, most=most, silence=0.5)
    joined(run)
    ended: list[bool] = []
    run.coordinator.actions = RunActions(end=ended.append, change=lambda: ended.append(False))
    run.coordinator.start()  # the node never starts to speak
    run.coordinator.stop(number, 1)
    wait_until(lambda: ended or any("after SIG" in line for line in run.told))
    final = run.coordinator.conclude(SAVED)
    assert (ended == [], most == 3 or final["status"] == status) == (number == 15, True)
    assert any("lost host1 (127.0.0.1): no message for" in line for line in [*run.told, *final["lost"]])


@pytest.mark.parametrize("side", ["coordinator", "node"])
def test_who_was_stopped_reads_what_came_meanwhile_before_it_judges(monkeypatch, place, side):
    run = place(2, silence=1.0)
    client = joined(run)
    paused = (run.coordinator if side == "coordinator" else client)._loop
    turn, pauses = paused.turn, []

    def turn_after_a_pause(seconds: float) -> None:
        turn(seconds)
        if len(pauses) < 2:
            pauses.append(time.sleep(1.5))

    paused.turn = turn_after_a_pause
    other = client if side == "coordinator" else run.coordinator
    monkeypatch.setattr(other, "_lose", lambda *_: None, raising=False)
    run.coordinator.start()
    client.start()
    wait_until(lambda: len(pauses) == 2)
    time.sleep(0.3)
    assert run.told == []
    assert not (client if side == "node" else run.coordinator)._done.is_set()


@pytest.mark.parametrize(("number", "status"), [(15, 75), (10, 3)])
def test_node_whose_coordinator_goes_ends_as_it_was_asked_to(place, number, status):
    run = place(2)
    client = joined(run)
    ended: list[bool] = []
    client.actions = RunActions(end=ended.append)
    client.start()
    client.stop(number, 1)
    run.coordinator._disconnect()
    wait_until(client._done.is_set)
    assert ended == ([] if number == 15 else [True])
    assert client.conclude(SAVED)["status"] == status


@pytest.mark.parametrize(("silence", "says"), [(0.5, "no message for"), (60, "it did not report how it ended")])
def test_node_that_is_lost_after_the_workers_blamed_its_connection_is_the_cause(monkeypatch, place, silence, says):
    monkeypatch.setattr(coordinator, "LINGER_SECONDS", 1.0)
    run = place(2, silence=silence, grace=0.5)
    joined(run)
    run.coordinator.start()  # the node never starts to speak
    blames = make_worker(0, code=1, message="RuntimeError: Connection closed by peer [10.0.0.2]")
    attempt = {"attempt": 0, "started_ns": 0, "ended_ns": 1, "workers": [blames], "cause": blames}
    final = run.coordinator.conclude({"status": 1, "stopped_by": None, "error": None, "attempt": attempt})
    assert final["status"] == 3
    assert f"lost host1 (127.0.0.1): {says}" in final["lost"][0]


def join_many(monkeypatch, place, count: int) -> tuple[Place, int]:
    """Have so many nodes join; return the run, and how many bytes went into connections of node 0's."""
    sent, plain = [], Connection.send_line

    def send_line(connection: Connection, line: str) -> None:
        if connection.transport.get_extra_info("sockname")[1] == run.port:  # the coordinator's side
            sent.append(len(line))
        plain(connection, line)

    run = place(count)
    monkeypatch.setattr(Connection, "send_line", send_line)
    threads = [run.come(number) for number in range(1, count)]
    assignment = run.coordinator.gather(counter())
    for thread in threads:
        thread.join(20)
    monkeypatch.setattr(Connection, "send_line", plain)
    assert (assignment.nodes, len(assignment.names), len(run.ends)) == (count, count, count - 1)
    return run, sum(sent)


def test_each_node_is_sent_as_much_among_many_as_among_few(monkeypatch, place):
    monkeypatch.setattr(coordinator, "NEWS_SECONDS", 60)
    # A node that comes while others start comes again, which costs bytes on a busy machine.
    few, many = (min(join_many(monkeypatch, place, count)[1] for _ in range(3)) / count for count in (12, 48))
    assert many < 1.2 * few


def test_signal_that_every_node_tells_of_reaches_each_node_once(monkeypatch, place):
    run, _ = join_many(monkeypatch, place, 6)
    heard: list[tuple[int, int]] = []
    run.coordinator.start()
    for end in run.ends:
        end.actions.stop = lambda number, times: heard.append((number, times))
        end.start()
    for end in run.ends:
        threading.Thread(target=end.stop, args=(15, 1)).start()
    wait_until(lambda: len(heard) >= 4)
    time.sleep(0.3)  # what else is under way
    assert heard == [(15, 1)] * 4  # the first to tell is not told; the others' words are not news
    run.ends[0].stop(15, 2)
    wait_until(lambda: len(heard) >= 8)
    assert heard[4:] == [(15, 2)] * 4
