"""What the coordinator sends grows with the number of nodes, and not with its square."""

import threading
import time

from fsdplaunch.launch.coordination import coordinator, network
from fsdplaunch.launch.coordination.node_info import FULL_MESH
from fsdplaunch.launch.coordination.protocol import Connection
from tests.joining import Place, counter


def join_many(monkeypatch, count: int) -> tuple[Place, dict[int, int]]:
    """Have so many nodes join; return the run, and how many bytes went into each connection of node 0's."""
    sent: dict[int, int] = {}
    plain = Connection.send_line

    def send_line(connection: Connection, line: str) -> None:
        if connection.transport.get_extra_info("sockname")[1] == place.port:  # the coordinator's side
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


def test_each_node_is_sent_as_much_among_many_as_among_few(monkeypatch):
    few, many = FULL_MESH + 2, 3 * FULL_MESH
    monkeypatch.setattr(coordinator, "NEWS_SECONDS", 60)
    sizes = {}
    for count in (few, many):
        place, sent = join_many(monkeypatch, count)
        sizes[count] = sum(sent.values()) / count
        place.close()
    assert sizes[many] < 1.2 * sizes[few]


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
    # The first to tell is not told; the others' words are not news.
    assert heard == [(15, 1)] * (count - 2)
    place.ends[0].stop(15, 2)
    while len(heard) < 2 * (count - 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert heard[count - 2 :] == [(15, 2)] * (count - 2)
    place.close()
