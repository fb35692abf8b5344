"""One end of a run out of every node's record; signals that reach each agent once, wherever they came first."""

import signal
from types import SimpleNamespace

import pytest

from fsdplaunch.launch.coordination import run_control
from fsdplaunch.launch.coordination.run_control import (
    SignalRelay,
    end_of_run,
    merge_outcomes,
    merged_record,
    no_better_than,
    outcome_of,
)
from tests.unit.launch.conftest import make_worker

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture
def parts(monkeypatch):
    """A relay, what its agent got, what the others were told, and a clock."""
    got, told, clock = [], [], [100.0]
    monkeypatch.setattr(run_control, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    agent, others = SimpleNamespace(send_signal=got.append), SimpleNamespace(stop=lambda *what: told.append(what))
    return SignalRelay(others, agent, [TERM, USR1]), got, told, clock


def test_signal_to_this_node_is_told_to_the_others_each_time(parts):
    signals, got, told, _ = parts
    assert signals.came(TERM)
    signals.heard(TERM, 1)  # a scheduler sends it to all nodes
    assert signals.came(TERM)
    assert (got, told) == ([], [(TERM, 1), (TERM, 2)])


def test_signal_that_came_through_another_node_first_is_not_repeated(parts):
    signals, got, told, clock = parts
    signals.heard(TERM, 1)
    clock[0] += 1
    assert not signals.came(TERM)
    assert (got, told) == ([TERM], [])
    signals.heard(TERM, 2)  # a second one there
    assert got == [TERM, TERM]
    clock[0] += 60
    assert signals.came(TERM)
    assert told == [(TERM, 3)]


def test_signal_that_is_not_passed_on_here_is_not_taken_from_elsewhere(parts):
    signals, got, _, _ = parts
    signals.heard(signal.SIGKILL, 1)
    assert got == []


def outcome(machine: int, *workers: dict, status: int = 0, stopped_by: str | None = None, **more) -> dict:
    attempt = {"attempt": 0, "started_ns": 0, "ended_ns": 1, "workers": list(workers), "cause": None}
    record = {"attempts": [attempt], "stopped_by": stopped_by, "error": None}
    about = {"host": f"host{machine}", "rank": machine, "offset_ns": 0}
    return outcome_of(record, status) | about | more


WELL = make_worker(0, code=0)


def end(*outcomes: dict, lost: tuple[str, ...] = (), stopped_by: str | None = None) -> dict:
    return merge_outcomes(outcomes, lost=lost, stopped_by=stopped_by)


def test_run_whose_nodes_all_ended_well_ends_with_0():
    final = end(outcome(0, WELL), outcome(1, make_worker(1, code=0)))
    assert (final["status"], final["cause"]) == (0, None)


def test_earliest_failure_over_all_nodes_is_the_cause():
    late = outcome(0, make_worker(0, code=1, at=5, message="ValueError: late"), status=1)
    early = outcome(1, make_worker(1, code=7, at=4, message="SystemExit: 7"), status=7)
    final = end(late, early)
    assert (final["status"], final["cause"]["rank"], final["cause"]["host"]) == (7, 1, "host1")


def test_clocks_that_differ_are_brought_together():
    here = outcome(0, make_worker(0, code=1, at=5, message="ValueError: second"), status=1)
    there = outcome(
        1, make_worker(1, code=1, at=100, message="ValueError: first"), status=1, offset_ns=-96 * 10**9
    )
    assert end(here, there)["cause"]["rank"] == 1


BLAMES = make_worker(1, code=1, message="RuntimeError: Connection closed by peer [10.0.0.2]")


@pytest.mark.parametrize(
    ("own", "status", "lost"),
    [
        (outcome(0, BLAMES, status=1), 3, ["lost host1"]),  # a broken connection to a lost node is not the cause
        (outcome(0, make_worker(0, code=9), status=9), 9, []),
        (outcome(0, status=5) | {"error": "the agent failed"}, 5, []),
    ],
)
def test_failure_of_its_own_counts_before_a_lost_node(own, status, lost):
    final = end(own, lost=("lost host1",))
    assert (final["status"], final["lost"], final["error"]) == (status, lost, own["error"])


@pytest.mark.parametrize(
    ("statuses", "status"), [((75, 75), 75), ((75, 0), 75), ((75, 143), 143), ((130, 130), 130)]
)
def test_stopped_run_ends_as_its_nodes_did(statuses, status):
    parts = [outcome(n, WELL, status=one, stopped_by="SIGTERM") for n, one in enumerate(statuses)]
    final = end(*parts, stopped_by="SIGTERM")
    assert (final["status"], final["stopped_by"]) == (status, "SIGTERM")


@pytest.mark.parametrize("told", ["SIGTERM", None])
@pytest.mark.parametrize(
    ("workers", "status", "final_status"),
    [
        ([WELL], 3, 75),  # its agent found node 0's store gone
        ([make_worker(1, code=-9, sent=(9,))], 3, 143),
        ([], 3, 143),
        ([BLAMES], 1, 143),  # its workers found their peers gone
        ([make_worker(1, code=3)], 3, 3),  # its script says 3
        ([make_worker(1, code=7, message="ValueError: x")], 7, 7),
    ],
)
def test_that_others_have_gone_is_no_news_in_a_stopped_run(workers, status, final_status, told):
    saved = outcome(0, WELL, status=75, stopped_by="SIGTERM")
    final = end(saved, outcome(1, *workers, status=status, stopped_by=told), stopped_by="SIGTERM")
    own = told is None and final_status not in (75, 143)
    assert (final["status"], final["stopped_by"]) == (final_status, None if own else "SIGTERM")


def test_node_that_was_asked_to_end_is_not_the_failure():
    asked = outcome(0, make_worker(0, code=-15, sent=(15,)), status=143, stopped_by="SIGTERM", ended=True)
    failed = outcome(1, status=3, error="RendezvousTimeoutError: nobody came")
    final = end(asked, failed)
    assert (final["status"], final["error"]) == (3, "RendezvousTimeoutError: nobody came")


def test_record_of_another_node_tells_the_common_cause():
    final = end_of_run(7, cause=make_worker(3, code=7) | {"host": "host1", "node": 1})
    record = {"attempts": [outcome(0, WELL)["attempt"]], "stopped_by": "SIGTERM"}
    merged = merged_record(record, final, all_nodes=False)
    (attempt,) = merged["attempts"]
    assert (attempt["cause"]["rank"], attempt["workers"], merged["stopped_by"]) == (3, [WELL], None)


def test_run_is_never_better_than_this_nodes_own_part():
    own = {"status": 9, "stopped_by": None, "error": "own failure", "attempt": None}
    assert no_better_than(own, end_of_run(0))["status"] == 9
    assert no_better_than(own, end_of_run(0))["error"] == "own failure"
    assert no_better_than(own, end_of_run(4))["status"] == 4
    assert no_better_than({**own, "status": 0}, end_of_run(0))["status"] == 0
