"""The lines that report the end of a run."""

from dataclasses import replace

import pytest

from fsdplaunch.launch.diagnosis import Diagnosis
from fsdplaunch.launch.root_cause import user_frames
from fsdplaunch.launch.run_result import RunResult, duration, end_line, failure_lines, read_result

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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.44, "0.4 s"), (12.3, "12 s"), (59.6, "1 m 00 s"), (252, "4 m 12 s"), (7440, "2 h 04 m")],
)
def test_durations_are_read_at_a_glance(seconds, text):
    assert duration(seconds) == text


def test_user_frames_leave_out_libraries_and_this_package():
    assert user_frames(TRACEBACK) == [
        "train.py:7 in <module>   main()",
        'model.py:3 in forward   raise ValueError("x")',
    ]


def test_user_frames_are_named_from_the_current_folder():
    text = '  File "/home/me/job/train.py", line 7, in f\n  File "/home/me/other.py", line 8, in g\n    x()\n'
    assert user_frames(text, folder="/home/me/job") == ["train.py:7 in f", "/home/me/other.py:8 in g   x()"]


def test_innermost_frame_stands_in_where_none_is_the_users():
    text = '  File "/v/site-packages/a.py", line 1, in f\n  File "/v/site-packages/b.py", line 2, in g\n    x()\n'
    assert user_frames(text) == ["/v/site-packages/b.py:2 in g   x()"]
    assert user_frames("") == []


def test_panel_names_rank_place_exception_frames_others_reason_and_log(worker, record):
    cause = worker(1, at=252, steps=318, message="ValueError: x\nsecond line", traceback=TRACEBACK)
    result = read_result(record(worker(0, code=-15, sent=[15]), cause), exit_code=1, gpus=("0", "1"))
    result = replace(result, diagnosis=Diagnosis(why="a reason", remedies=("one thing", "another")))
    assert failure_lines(result, run_dir="runs/x") == [
        "rank 1 failed with exit code 1 after 4 m 12 s, at step 318",
        "  on node-1, GPU 1, process 101",
        "  ValueError: x",
        "  second line",
        "    train.py:7 in <module>   main()",
        '    model.py:3 in forward   raise ValueError("x")',
        "  rank 0 was stopped because of it",
        "",
        "  why  a reason",
        "  try  one thing",
        "       another",
        "  log  runs/x/ranks/1/stderr.log",
    ]


def test_killed_rank_shows_its_last_words(worker, record):
    cause = worker(0, code=-9, tail=[f"line {number}" for number in range(9)])
    lines = failure_lines(read_result(record(cause), exit_code=137), run_dir="r")
    assert lines[0] == "rank 0 was killed by SIGKILL after 1.0 s"
    assert lines[2:8] == [f"    line {number}" for number in range(3, 9)]


def test_hint_of_an_own_error_is_not_repeated_in_its_text(worker, record):
    cause = worker(0, message="ShardingError: no blocks\nhint: name them")
    lines = failure_lines(read_result(record(cause), exit_code=1), run_dir="r")
    assert "  ShardingError: no blocks" in lines
    assert not any("name them" in line for line in lines)


def test_long_messages_are_cut(worker, record):
    cause = worker(0, message="ValueError: 0\n" + "\n".join(map(str, range(1, 9))))
    lines = failure_lines(read_result(record(cause), exit_code=1), run_dir="r")
    assert lines[2:7] == ["  ValueError: 0", "  1", "  2", "  3", "  ..."]


def test_run_that_failed_without_a_worker_says_so():
    lines = failure_lines(read_result({"error": "RuntimeError: no"}, exit_code=1), run_dir="runs/x")
    assert lines == [
        "the run failed with exit code 1, and no worker is to blame",
        "  RuntimeError: no",
        "",
        "  log  runs/x/agent.log",
    ]


def test_run_that_lost_a_machine_is_told_of_elastic_runs_where_there_can_be_one():
    result = read_result({"error": "lost", "lost": ["lost host1: gone"]}, exit_code=3)
    lines = failure_lines(result, run_dir="r")
    assert lines[0] == "lost host1: gone"
    assert lines[-1].startswith("  try  is that node up, and its network? with launch.nodes: MIN:MAX")
    assert failure_lines(result, run_dir="r", fixed_size=True)[-1] == "  try  is that node up, and its network?"


def test_end_without_a_failure_is_one_line():
    assert end_line(RunResult(exit_code=0, seconds=3.21), workers=2) == "finished in 3.2 s, 2 workers"
    again = RunResult(exit_code=0, seconds=3.21, attempts=({}, {}))
    assert end_line(again, workers=2) == "finished in 3.2 s, 2 workers, attempt 2"
    saved = RunResult(exit_code=75, seconds=61, stopped_by="SIGTERM")
    assert end_line(saved, workers=2) == (
        "stopped by SIGTERM after 1 m 01 s: every worker ended well, start it again to go on"
    )
    assert end_line(RunResult(exit_code=130, seconds=1, stopped_by="SIGINT"), workers=1) == (
        "stopped by SIGINT after 1.0 s"
    )
