"""RunResult and the lines that report it."""

from types import SimpleNamespace

from fsdplaunch.launch.agent import _describe_failure, exit_status
from fsdplaunch.launch.result import failure_lines, read_result, user_frames

TRACEBACK = """Traceback (most recent call last):
  File "/opt/pkg/fsdplaunch/runtime/bootstrap.py", line 10, in main
    run()
  File "train.py", line 7, in <module>
    main()
  File "/venv/site-packages/torch/nn/modules/module.py", line 1, in _call
    return forward()
  File "model.py", line 3, in forward
    raise ValueError("x")
ValueError: x
"""


def failure(*, exitcode, time_ns=None, second=100, message=None):
    extra = {"timestamp": str(second), "py_callstack": "T"} | ({"time_ns": time_ns} if time_ns else {})
    recorded = {"message": message, "extraInfo": extra} if message else f"Signal {-exitcode}"
    return SimpleNamespace(
        message=recorded, exitcode=exitcode, timestamp=second, local_rank=0, pid=1, signal_name=lambda: "SIGKILL"
    )


def test_exit_status_of_a_signal_is_128_plus_it():
    assert (exit_status(7), exit_status(-9), exit_status(-11)) == (7, 137, 139)


def test_first_failure_is_the_earliest_by_nanoseconds():
    failures = {
        0: failure(exitcode=1, time_ns=100_900_000_000, message="B"),
        1: failure(exitcode=1, time_ns=100_800_000_000, message="A"),
    }
    found = _describe_failure(failures)
    assert (found["rank"], found["message"], found["failed_ranks"]) == (1, "A", [0, 1])


def test_killed_rank_comes_before_its_peers_complaints():
    failures = {
        0: failure(exitcode=1, time_ns=100_100_000_000, message="RuntimeError: connection closed by peer"),
        1: failure(exitcode=-9, second=101),
    }
    found = _describe_failure(failures)
    assert (found["rank"], found["exit_code"], found["signal"], found["message"]) == (1, 137, "SIGKILL", None)


def test_rank_that_the_agent_stopped_is_not_the_cause():
    failures = {0: failure(exitcode=-15), 1: failure(exitcode=3, second=101, message="ValueError: x")}
    assert _describe_failure(failures)["rank"] == 1


def test_result_of_a_failed_rank_keeps_its_own_exit_code():
    record = {"seconds": 3.2, "failure": {"rank": 1, "exit_code": 7, "signal": None, "message": "ValueError: x"}}
    result = read_result(record, exit_code=7)
    assert (result.exit_code, result.failure.rank, result.failure.message) == (7, 1, "ValueError: x")


def test_requested_stop_is_not_a_failure():
    result = read_result({"seconds": 1, "failure": {"stopped_by": "SIGINT"}}, exit_code=130)
    assert (result.failure, result.stopped_by) == (None, "SIGINT")


def test_agent_that_left_no_record_is_reported():
    lines = failure_lines(read_result({}, exit_code=1), script="t.py", run_dir="runs/x")
    assert "before any worker" in lines[0]
    assert "runs/x/agent.log" in lines[1]


def test_user_frames_leave_out_libraries_and_this_package():
    frames = user_frames(TRACEBACK, script="train.py")
    assert frames == [
        'File "train.py", line 7, in <module>',
        "  main()",
        'File "model.py", line 3, in forward',
        '  raise ValueError("x")',
    ]


def test_failure_lines_name_rank_exception_frames_and_logs():
    record = {
        "seconds": 3.2,
        "failure": {"rank": 1, "exit_code": 1, "message": "ValueError: x", "traceback": TRACEBACK},
    }
    lines = failure_lines(read_result(record, exit_code=1), script="train.py", run_dir="runs/x")
    assert lines[0] == "rank 1 failed with exit code 1 after 3 s"
    assert lines[1] == "  ValueError: x"
    assert any("model.py" in line for line in lines)
    assert lines[-1] == "  logs: runs/x/ranks/1"
