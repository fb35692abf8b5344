"""What the coordinator sends and does grows with the number of nodes, and not with its square."""

import threading
import time

from fsdplaunch.launch.coordination import coordinator, network
from fsdplaunch.launch.coordination.node_info import FULL_MESH
from fsdplaunch.launch.coordination.protocol import Connection
from fsdplaunch.launch.coordination.server import ConnectedNodes
from tests.joining import Place, counter


def join_many(monkeypatch, count: int) -> tuple[Place, dict[int, int]]:
    """Have so many nodes join; return the run, and how many bytes went into each connection of node 0's."""
    sent: dict[int, int] = {}
    plain = Connection.send_line

    def send_line(connection: Connection, line: str) -> None:
        if connection.sock.getsockname()[1] == place.port:  # the coordinator's side
            sent[id(connection)] = sent.get(id(connection), 0) + len(line)
        plain(connection, line)

    place = Place(count)
    place.reachability_probes += [network.ReachabilityProbe("127.0.0.1") for _ in range(count - 4)]
    monkeypatch.setattr(Connection, "send_line", send_line)
    threads = [place.come(number) for number in range(1, count)]
    assignment = place.coordinator.gather(counter())
    for thread in threads:
        thread.join(20)
    monkeypatch.setattr(Connection, "send_line", plain)
    assert (assignment.nodes, len(assignment.names), len(place.ends)) == (count, count, count - 1)
    return place, sent


def count_looks(monkeypatch) -> list[tuple[ConnectedNodes, str]]:
    """Note each time that somebody goes through all connections, or all nodes, of a coordinator."""
    looks: list[tuple[ConnectedNodes, str]] = []

    def noted(name: str, plain):
        return lambda nodes: (looks.append((nodes, name)), plain(nodes))[1]

    monkeypatch.setattr(ConnectedNodes, "present", property(noted("present", ConnectedNodes.present.fget)))
    monkeypatch.setattr(ConnectedNodes, "__iter__", noted("all", ConnectedNodes.__iter__))
    return looks


def looks_at(place: Place, looks: list[tuple[ConnectedNodes, str]]) -> list[str]:
    """Of the noted looks, those at one run's nodes: runs of other tests may be about to end."""
    return [name for nodes, name in looks if nodes is place.coordinator._server.nodes]


def test_each_node_is_sent_as_much_among_many_as_among_few_and_nobody_is_looked_at_for_it(monkeypatch):
    few, many = FULL_MESH + 2, 3 * FULL_MESH
    looks = count_looks(monkeypatch)
    monkeypatch.setattr(coordinator, "NEWS_SECONDS", 60)
    sizes, looked = {}, {}
    for count in (few, many):
        place, sent = join_many(monkeypatch, count)
        sizes[count] = sum(sent.values()) / count
        looked[count] = looks_at(place, looks)
        place.close()
        looks.clear()
    assert sizes[many] < 1.2 * sizes[few]
    assert looked[many] == looked[few]  # so many messages, and not one of them a reason to go through the nodes


def test_outcomes_of_many_nodes_are_counted_and_not_looked_for(monkeypatch):
    place, _ = join_many(monkeypatch, 4)
    looks = count_looks(monkeypatch)
    outcome = {"status": 0, "stopped_by": None, "error": None, "attempt": None}
    place.coordinator.start()
    for end in place.ends:
        end.start()
    finals: list[dict] = []
    threads = [
        threading.Thread(target=lambda node=node: finals.append(node.conclude(outcome)))
        for node in (place.coordinator, *place.ends)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [final["status"] for final in finals] == [0] * 4
    assert looks_at(place, looks) == [
        "all",
        "present",
        "all",
    ]  # to merge what all said, to tell them, to see it sent
    place.close()


def test_news_of_a_long_wait_go_to_all_in_turn(monkeypatch):
    monkeypatch.setattr(coordinator, "TOLD_AT_ONCE", 2)
    monkeypatch.setattr(coordinator, "NEWS_SECONDS", 0.05)
    told: list[int] = []
    place = Place(5, seconds=5)
    monkeypatch.setattr(
        ConnectedNodes, "present", property(lambda _nodes: [Listener(number, told) for number in range(3)])
    )
    phase = coordinator.JoinPhase(place.coordinator._server)
    for _ in range(4):
        phase._spread_news(kind="waiting", here=3, of=5)
    assert told == [0, 1, 2, 0, 1, 2]
    place.close()


class Listener:
    """A node that notes that it was told something."""

    def __init__(self, number: int, told: list[int]) -> None:
        self.number, self.told = number, told

    def send_line(self, line: str) -> None:
        assert '"here": 3' in line
        self.told.append(self.number)


def test_signal_that_every_node_tells_of_reaches_each_node_once(monkeypatch):
    count = 6
    place, _ = join_many(monkeypatch, count)
    heard: list[tuple[int, int]] = []
    place.coordinator.start()
    for end in place.ends:
        end.actions.stop = lambda number, times: heard.append((number, times))
        end.start()
    tellers = [threading.Thread(target=end.stop, args=(15, 1)) for end in place.ends]
    for teller in tellers:
        teller.start()
    deadline = time.monotonic() + 10
    while len(heard) < count - 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)  # what else is under way
    # The first to tell is not told; the others' words are no news.
    assert heard == [(15, 1)] * (count - 2)
    place.ends[0].stop(15, 2)
    while len(heard) < 2 * (count - 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert heard[count - 2 :] == [(15, 2)] * (count - 2)
    place.close()
