"""RunResult: what an agent's record says."""

from fsdplaunch.launch.run_result import describe_others, read_result


def test_result_of_a_failed_rank_keeps_its_own_exit_code(worker, record):
    cause = worker(1, code=7, message="ValueError: x", at=2.5, steps=3)
    result = read_result(record(worker(0, code=-15, sent=[15]), cause), exit_code=7, seconds=9, gpus=("2", "5"))
    failure = result.failure
    assert (result.exit_code, failure.rank, failure.message) == (7, 1, "ValueError: x")
    assert (failure.gpu, failure.host, failure.pid, failure.steps, failure.seconds) == ("5", "node-1", 101, 3, 2.5)
    assert failure.log == "ranks/1/stderr.log"
    assert failure.others == ("rank 0 was stopped because of it",)


def test_requested_stop_is_not_a_failure(record):
    result = read_result(record(stopped_by="SIGINT"), exit_code=130)
    assert (result.failure, result.stopped_by) == (None, "SIGINT")


def test_agent_that_left_no_record_is_a_failure_without_a_rank():
    failure = read_result({"error": "RendezvousError: nobody came"}, exit_code=3).failure
    assert (failure.rank, failure.exit_code, failure.message) == (None, 3, "RendezvousError: nobody came")


def test_log_of_a_later_attempt_has_its_name(worker, record):
    data = record(worker(0))
    data["attempts"][0]["attempt"] = 2
    assert read_result(data, exit_code=1).failure.log == "ranks/0/stderr.attempt2.log"


def test_others_are_told_together(worker):
    cause = worker(0, message="ValueError: x")
    others = [
        worker(1, code=-15, sent=[15]),
        worker(2, code=-15, sent=[15]),
        worker(3, code=0),
        worker(4, code=-9, sent=[15, 9]),
        worker(5, message="RuntimeError: Connection closed by peer"),
        worker(6, code=-11),
    ]
    assert describe_others(cause, [cause, *others]) == [
        "ranks 1, 2 were stopped because of it",
        "rank 3 ended well",
        "rank 4 did not stop when asked and was killed",
        "rank 5 failed: RuntimeError: Connection closed by peer",
        "rank 6 was killed by SIGSEGV",
    ]


def test_others_that_failed_alike_are_not_repeated(worker):
    cause = worker(0, message="ImportError: x")
    assert describe_others(cause, [worker(rank, message="ImportError: x") for rank in range(3)]) == [
        "ranks 1, 2 failed in the same way"
    ]
    text = "RuntimeError: [/pytorch/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:3. This is typical."
    assert describe_others(cause, [worker(1, message=text)]) == [
        "rank 1 failed: RuntimeError: Connection closed by peer [127.0.0.1]:3"
    ]


def test_many_alike_are_counted(worker):
    cause = worker(0)
    others = [worker(rank, code=-15, sent=[15]) for rank in range(1, 12)]
    assert describe_others(cause, others) == ["11 other ranks were stopped because of it"]


def test_data_tells_every_attempt(worker, record):
    data = record(worker(0, code=0, peak_bytes=5), worker(1, code=-9, at=2))
    written = read_result(data, exit_code=137).to_dict()
    assert written["stage"] == "run"
    (attempt,) = written["attempts"]
    assert attempt["cause"] == "rank 1 was killed by SIGKILL"
    assert [rank["exit_code"] for rank in attempt["ranks"]] == [0, 137]
    assert attempt["ranks"][0]["peak_bytes"] == 5
    assert written["failure"]["rank"] == 1
    assert written["failure"]["try"] == []
