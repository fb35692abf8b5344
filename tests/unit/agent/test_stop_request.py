"""Requests to stop: echoes, impatience, warnings, and the status they lead to."""

import signal
import time

import pytest

from fsdplaunch.agent.worker_group import StopRequest, stop_status
from fsdplaunch.errors import EXIT_SAVED

TERM, INT, USR1 = int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGUSR1)


def later(stop: StopRequest, seconds: float) -> None:
    stop.since -= seconds


def test_first_signal_is_passed_on_once_and_its_echo_is_not_impatience():
    stop = StopRequest(30)
    assert stop.request(TERM)
    assert not stop.request(TERM)
    assert not stop.insisted


@pytest.mark.parametrize(("number", "pause"), [(INT, 0.4), (TERM, 1.1)])
def test_second_signal_insists(number, pause):
    stop = StopRequest(30)
    stop.request(number)
    later(stop, pause)
    assert not stop.request(number)
    assert stop.insisted


def test_request_after_a_warning_is_a_first_request():
    stop = StopRequest(30)
    assert stop.request(USR1)
    assert stop.is_warning
    assert stop.request(TERM)
    assert (stop.number, stop.insisted, stop.is_warning) == (TERM, False, False)


def test_grace_ends():
    stop = StopRequest(5)
    assert not stop.is_over
    stop.request(TERM)
    assert not stop.is_over
    later(stop, 5.1)
    assert stop.is_over
    assert time.monotonic() > stop.since


@pytest.mark.parametrize(
    ("number", "codes", "status"),
    [
        (TERM, [0, 0], EXIT_SAVED),
        (USR1, [0, 0], EXIT_SAVED),
        (INT, [0, 0], 130),
        (INT, [1, -9], 130),
        (TERM, [-15, 0], 143),
        (TERM, [None, 0], 143),
        (TERM, [], 143),
        (TERM, [3, 0], None),
    ],
)
def test_status_follows_how_the_workers_ended(number, codes, status):
    assert stop_status(number, codes) == status
