"""RunResult and the lines that report it."""

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


def record(cause, **more):
    return {"seconds": 3.2, "attempts": [{"attempt": 0, "workers": [], "cause": cause}]} | more


def test_result_of_a_failed_rank_keeps_its_own_exit_code():
    cause = {"rank": 1, "signal": None, "error": {"message": "ValueError: x", "traceback": None}}
    result = read_result(record(cause), exit_code=7)
    assert (result.exit_code, result.failure.rank, result.failure.message) == (7, 1, "ValueError: x")


def test_requested_stop_is_not_a_failure():
    result = read_result(record(None, stopped_by="SIGINT"), exit_code=130)
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
    cause = {"rank": 1, "signal": None, "error": {"message": "ValueError: x", "traceback": TRACEBACK}}
    lines = failure_lines(read_result(record(cause), exit_code=1), script="train.py", run_dir="runs/x")
    assert lines[0] == "rank 1 failed with exit code 1 after 3 s"
    assert lines[1] == "  ValueError: x"
    assert any("model.py" in line for line in lines)
    assert lines[-1] == "  logs: runs/x/ranks/1"
