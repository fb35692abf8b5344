"""Which worker's failure explains the others', and what is said and kept of the end of a run."""

from dataclasses import replace

import pytest

from fsdplaunch.launch.diagnosis import Diagnosis
from fsdplaunch.launch.root_cause import failure_status, first_failure, has_failed, own_signal, user_frames
from fsdplaunch.launch.run_result import (
    RunResult,
    describe_others,
    duration,
    end_line,
    failure_lines,
    read_result,
    read_start,
)

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


def test_durations_are_read_at_a_glance():
    texts = {0.44: "0.4 s", 12.3: "12 s", 59.6: "1 m 00 s", 252: "4 m 12 s", 7440: "2 h 04 m"}
    assert {seconds: duration(seconds) for seconds in texts} == texts


def test_user_frames_are_named_from_the_current_folder_and_the_innermost_stands_in_where_none_is_the_users():
    text = '  File "/home/me/job/train.py", line 7, in f\n  File "/home/me/other.py", line 8, in g\n    x()\n'
    assert user_frames(text, folder="/home/me/job") == ["train.py:7 in f", "/home/me/other.py:8 in g   x()"]
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


def test_hint_of_an_own_error_is_not_repeated_in_its_text_and_long_messages_are_cut(worker, record):
    cause = worker(0, message="ShardingError: 0\n" + "\n".join(map(str, range(1, 9))) + "\nhint: name them")
    lines = failure_lines(read_result(record(cause), exit_code=1), run_dir="r")
    assert lines[2:7] == ["  ShardingError: 0", "  ...", "  6", "  7", "  8"]
    assert not any("name them" in line for line in lines)


def test_failure_that_nothing_is_known_about_says_so(worker, record):
    lines = failure_lines(read_result(record(worker(0, message="KeyError: 'a'")), exit_code=1), run_dir="r")
    assert lines[-2].startswith("  why  it matches no known cause")


def test_run_that_failed_without_a_worker_says_so():
    lines = failure_lines(read_result({"error": "RuntimeError: no"}, exit_code=1), run_dir="runs/x")
    assert lines == [
        "the run failed with exit code 1, and no worker caused it",
        "  RuntimeError: no",
        "",
        "  why  the agent that watches the workers itself failed; its log has the traceback",
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
        "stopped by SIGTERM after 1 m 01 s: every worker ended cleanly, launch it again to resume"
    )
    assert end_line(RunResult(exit_code=130, seconds=1, stopped_by="SIGINT"), workers=1) == (
        "stopped by SIGINT after 1.0 s"
    )


def test_parts_of_a_start_lead_to_the_first_attempts_last_script(tmp_path):
    """Seconds after the begin: a fork server (8) and two workers, of which the second is slower, and a restart."""
    seconds = [("0", "begin", 0), ("0", "plan", 1), ("7", "agent", 2), ("7", "torch", 4), ("8", "imports", 5)]
    seconds += [("21", "fork", 6), ("22", "fork", 7), ("21", "imports", 7), ("21", "script", 8)]
    seconds += [("22", "imports", 9), ("22", "script", 12), ("23", "fork", 20), ("23", "script", 25)]
    file = tmp_path / "start.txt"
    file.write_text("".join(f"{pid} {part} {10**18 + after * 10**9}\n" for pid, part, after in seconds))
    found = {"plan": 1, "agent": 1, "torch": 2, "imports": 1 + 2, "fork": 2, "script": 3}
    assert read_start(file, workers=2) == found
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))  # it failed before there was a worker
    assert read_start(file, workers=2) == {"plan": 1, "agent": 1}


def test_log_of_a_later_attempt_has_its_name(worker, record):
    data = record(worker(0))
    data["attempts"][0]["attempt"] = 2
    assert read_result(data, exit_code=1).failure.log == "ranks/0/stderr.attempt3.log"


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
    many = [worker(rank, code=-15, sent=[15]) for rank in range(1, 12)]
    assert describe_others(cause, many) == ["11 other ranks were stopped because of it"]


def test_others_that_failed_alike_are_not_repeated(worker):
    cause = worker(0, message="ImportError: x")
    assert describe_others(cause, [worker(rank, message="ImportError: x") for rank in range(3)]) == [
        "ranks 1, 2 failed in the same way"
    ]
    text = "RuntimeError: [/pytorch/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:3. This is typical."
    assert describe_others(cause, [worker(1, message=text)]) == [
        "rank 1 failed: RuntimeError: Connection closed by peer [127.0.0.1]:3"
    ]


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


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_durations_are_not_of_a_clock_that_was_set_meanwhile(worker, record, jump):
    late = worker(1, code=-9, at=2 + jump, ran_ns=2 * 10**9)
    data = record(worker(0, code=0, at=1, ran_ns=3 * 10**9), late)
    data["attempts"][-1] |= {"ended_ns": int(jump * 10**9) + 1, "ran_ns": 4 * 10**9}
    result = read_result(data, exit_code=137)
    assert result.failure.seconds == 2
    (attempt,) = result.to_dict()["attempts"]
    assert (attempt["seconds"], [rank["seconds"] for rank in attempt["ranks"]]) == (4, [1, 2])


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
    other = ["python: malloc.c:2379: sysmalloc: Assertion failed"]  # which counts by its time
    assert first_failure([worker(0, code=-6, at=100, tail=other), workers[1]])["rank"] == 0


def test_where_all_blame_a_connection_the_earliest_is_named(worker):
    blame = "RuntimeError: Timed out waiting 1000ms for recv operation to complete"
    assert first_failure([worker(0, at=2.0, message=blame), worker(1, at=1, message=blame)])["rank"] == 1


def test_worker_that_the_launcher_ended_has_not_failed_unless_it_had_before(worker):
    assert not has_failed(worker(0, code=-15, sent=[15]))
    assert has_failed(worker(0, code=-9, sent=[15]))
    assert first_failure([worker(0, code=0), worker(1, code=-15, sent=[15])]) is None
    first = worker(1, code=-15, sent=[15], at=100, message="ValueError: x")
    assert first_failure([worker(0, at=200, message="ValueError: y"), first]) is first
    assert own_signal(first) is None
    assert own_signal(worker(0, code=-9, sent=[15])) == "SIGKILL"


@pytest.mark.parametrize(
    ("code", "sent", "message", "status"),
    [
        (7, [], None, 7),
        (-11, [], None, 139),
        (-15, [15], "ValueError: x", 1),
        (-15, [15], "this machine has GPUs, and torch cannot use them", 3),
    ],
)
def test_status_is_the_causes_own_or_what_it_was_about_to_end_with(worker, code, sent, message, status):
    found = worker(0, code=code, sent=sent, message=message, status=status)
    assert failure_status(found) == status
