"""Requests to stop and the status they lead to; ending a worker, in every moment of its life; its last words."""

import os
import signal
from pathlib import Path

import pytest

import fsdplaunch
from fsdplaunch.agent.fork_server import kill_group, kill_worker
from fsdplaunch.agent.worker_group import StopRequest, last_words

TERM, INT, USR1 = int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGUSR1)


@pytest.mark.parametrize(("number", "pause"), [(INT, 0.4), (TERM, 1.1)])
def test_first_signal_is_passed_on_its_echo_is_none_and_a_second_one_insists(number, pause):
    stop = StopRequest(30)
    assert stop.request(number)
    assert not stop.request(number)
    assert not stop.insisted
    stop.since -= pause
    assert not stop.request(number)
    assert stop.insisted


def test_request_after_a_warning_is_a_first_request_whose_grace_ends():
    stop = StopRequest(5)
    assert stop.request(USR1)
    assert stop.is_warning
    assert stop.request(TERM)
    assert (stop.number, stop.insisted, stop.is_warning, stop.is_over) == (TERM, False, False, False)
    stop.since -= 5.1
    assert stop.is_over


def test_a_worker_that_leads_no_group_yet_is_killed():
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    kill_worker(pid)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    kill_group(pid)  # says nothing where there is none


def test_of_a_crash_what_was_said_and_the_scripts_lines_are_kept_and_else_the_end():
    crash = [
        "training",
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "  what():  op.preamble.length <= op.nbytes. 20 vs 10",
        "Fatal Python error: Aborted",
        "",
        "Thread 0x01 (most recent call first):",
        f'  File "{Path(fsdplaunch.__file__).parent}/runtime/bootstrap.py", line 5 in _serve',
        '  File "/home/a/.venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 9 in backward',
        '  File "/home/a/train.py", line 14 in step',
        '  File "/home/a/train.py", line 30 in <module>',
        '  File "<frozen runpy>", line 88 in _run_code',
        "",
        "Extension modules: numpy (total: 1)",
    ]
    assert last_words(crash) == [*crash[1:4], *crash[8:10]]
    assert last_words([str(number) for number in range(40)], most=3) == ["37", "38", "39"]
