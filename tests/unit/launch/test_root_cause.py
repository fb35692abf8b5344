"""Which worker's failure explains the others'."""

import pytest

from fsdplaunch.launch.root_cause import failure_status, first_failure, has_failed, own_signal, shell_status


def test_status_of_a_signal_is_128_plus_it():
    assert (shell_status(7), shell_status(-9), shell_status(-11), shell_status(0)) == (7, 137, 139, 0)


def test_earliest_exception_is_the_cause(worker):
    workers = [worker(0, at=900, message="ValueError: b"), worker(1, at=800, message="ValueError: a")]
    assert first_failure(workers)["rank"] == 1


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3301",
        "RuntimeError: [pair.cc:144] Read error [127.0.0.1]:1: Connection reset by peer",
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2012, remote process exited or there was a network",
        "RuntimeError: [1] is setting up NCCL, but store->get('0') got error: Connection reset by peer",
        "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Broken pipe",
    ],
)
def test_rank_that_blames_its_connection_is_not_the_cause(message, worker):
    workers = [worker(0, at=100, message=message), worker(1, code=-9, at=200)]
    assert first_failure(workers)["rank"] == 1


def test_abort_by_the_watchdog_is_not_the_cause(worker):
    tail = ["terminate called after throwing an instance of 'c10::DistBackendError'", "  what():  NCCL error"]
    workers = [worker(0, code=-6, at=100, tail=tail), worker(1, at=200, message="KeyError: 'x'")]
    assert first_failure(workers)["rank"] == 1


def test_abort_for_another_reason_counts_by_its_time(worker):
    tail = ["python: malloc.c:2379: sysmalloc: Assertion failed"]
    workers = [worker(0, code=-6, at=100, tail=tail), worker(1, at=200, message="KeyError: 'x'")]
    assert first_failure(workers)["rank"] == 0


def test_where_all_blame_a_connection_the_earliest_is_named(worker):
    blame = "RuntimeError: Timed out waiting 1000ms for recv operation to complete"
    assert first_failure([worker(0, at=2.0, message=blame), worker(1, at=1, message=blame)])["rank"] == 1


def test_worker_that_was_ended_by_the_launcher_has_not_failed(worker):
    assert not has_failed(worker(0, code=-15, sent=[15]))
    assert has_failed(worker(0, code=-9, sent=[15]))
    assert first_failure([worker(0, code=0), worker(1, code=-15, sent=[15])]) is None


def test_exception_of_a_worker_that_was_then_ended_still_counts(worker):
    first = worker(1, code=-15, sent=[15], at=100, message="ValueError: x")
    assert first_failure([worker(0, at=200, message="ValueError: y"), first]) is first
    assert failure_status(first) == 1


def test_signal_of_a_worker_that_had_failed_before_we_ended_it_is_not_told(worker):
    assert own_signal(worker(0, code=-15, sent=[15], message="ValueError: x")) is None
    assert own_signal(worker(0, code=-9, sent=[15])) == "SIGKILL"
    assert own_signal(worker(0, code=3)) is None


def test_status_that_a_worker_had_asked_for_counts_though_it_was_ended_first(worker):
    assert failure_status(worker(0, code=-15, sent=[15], message="SystemExit: 4")) == 4
    assert failure_status(worker(0, code=-15, sent=[15], message="SystemExit: some text")) == 1


def test_status_of_the_cause_is_its_own(worker):
    assert failure_status(worker(0, code=7)) == 7
    assert failure_status(worker(0, code=-11)) == 139
