"""Signals of a run on several nodes: each reaches an agent once, wherever it came first."""

import signal

import pytest

from fsdplaunch.launch.coordination import run_control
from fsdplaunch.launch.coordination.run_control import SignalRelay

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


class Agent:
    def __init__(self) -> None:
        self.got: list[int] = []

    def send_signal(self, number: int) -> None:
        self.got.append(number)


class Others:
    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def stop(self, number: int, count: int) -> None:
        self.told.append((number, count))


@pytest.fixture
def parts(monkeypatch):
    agent, others, clock = Agent(), Others(), [100.0]
    monkeypatch.setattr(run_control.time, "monotonic", lambda: clock[0])
    return SignalRelay(others, agent, [TERM, USR1]), agent, others, clock


def test_signal_to_this_node_is_told_to_the_others_each_time(parts):
    signals, _, others, _ = parts
    assert signals.came(TERM)
    assert signals.came(TERM)
    assert others.told == [(TERM, 1), (TERM, 2)]


def test_signal_that_a_scheduler_sends_to_all_nodes_arrives_once(parts):
    signals, agent, others, _ = parts
    assert signals.came(TERM)
    signals.heard(TERM, 1)
    assert (agent.got, others.told) == ([], [(TERM, 1)])


def test_signal_that_came_through_another_node_first_is_not_repeated(parts):
    signals, agent, others, clock = parts
    signals.heard(TERM, 1)
    assert agent.got == [TERM]
    clock[0] += 1
    assert not signals.came(TERM)
    assert others.told == []


def test_second_signal_on_another_node_is_passed_on(parts):
    signals, agent, _, _ = parts
    signals.heard(TERM, 1)
    signals.heard(TERM, 2)
    assert agent.got == [TERM, TERM]


def test_signal_long_after_the_echo_is_a_new_one(parts):
    signals, _, others, clock = parts
    signals.heard(USR1, 1)
    clock[0] += 60
    assert signals.came(USR1)
    assert others.told == [(USR1, 2)]


def test_signal_that_is_not_passed_on_here_is_not_taken_from_elsewhere(parts):
    signals, agent, _, _ = parts
    signals.heard(signal.SIGKILL, 1)
    assert agent.got == []
