"""Who is behind, read from heartbeats and from stacks as faulthandler writes them."""

import struct

import pytest

from fsdplaunch.agent.watchdog import Watchdog, describe_stall, find_behind, read_position
from fsdplaunch.run_dir import HEARTBEAT, LAYOUT, STACK, Heartbeat, read_heartbeat

WAITING = """Thread 0x00007f3b (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f3c (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3021 in all_reduce
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 90 in step
  File "/home/me/train.py", line 120 in <module>
"""
ELSEWHERE = """Current thread 0x00007f3c (most recent call first):
  File "/home/me/data.py", line 12 in load_batch
  File "/home/me/train.py", line 88 in step
"""


def beat(steps):
    return Heartbeat(pid=1, steps=steps, time_ns=5)


def test_position_is_the_users_innermost_line():
    waiting = read_position(0, beat(7), WAITING)
    assert (waiting.waits, waiting.frame, waiting.steps) == (True, "train.py:90 in step", 7)
    elsewhere = read_position(1, None, ELSEWHERE)
    assert (elsewhere.waits, elsewhere.frame, elsewhere.steps) == (False, "data.py:12 in load_batch", None)


def test_rank_that_is_not_in_the_collective_is_behind():
    positions = [read_position(0, beat(3), WAITING), read_position(1, beat(3), ELSEWHERE)]
    assert [position.rank for position in find_behind(positions)] == [1]
    line = describe_stall(positions, 600, run_dir="runs/x")
    assert line == (
        "no rank has got on for 600 s: 1 rank waits for rank 1 (step 3, data.py:12 in load_batch); "
        "stacks in runs/x/ranks/*/stack.txt"
    )


def test_fewer_steps_are_behind_wherever_the_ranks_are():
    positions = [read_position(rank, beat(5 - (rank == 2)), WAITING) for rank in range(4)]
    assert [position.rank for position in find_behind(positions)] == [2]


def test_ranks_that_are_all_alike_are_said_to_be():
    positions = [read_position(rank, beat(3), ELSEWHERE) for rank in range(2)]
    assert find_behind(positions) == []
    assert "all ranks are alike (rank 0: step 3, data.py:12 in load_batch)" in describe_stall(
        positions, 60, run_dir="r"
    )


def test_rank_without_an_answer_is_behind_those_that_wait():
    positions = [read_position(0, beat(0), WAITING), read_position(1, None, "")]
    assert "for rank 1 (does not answer)" in describe_stall(positions, 60, run_dir="r")


@pytest.mark.parametrize("data", [b"", b"short", None])
def test_heartbeat_that_is_not_there_is_none(tmp_path, data):
    if data is not None:
        (tmp_path / HEARTBEAT).write_bytes(data)
    assert read_heartbeat(tmp_path) is None


def test_heartbeat_is_read_back(tmp_path):
    (tmp_path / HEARTBEAT).write_bytes(struct.pack("<QQQ", 12, 34, 56))
    assert read_heartbeat(tmp_path) == Heartbeat(pid=12, steps=34, time_ns=56)
    assert LAYOUT.size == 24


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("fsdplaunch.agent.watchdog.time", clock)
    return clock


def looks(watchdog, clock, seconds):
    """What the watchdog says while time goes on."""
    said = []
    for _ in range(int(seconds * 2)):
        clock.now += 0.5
        said += [line] if (line := watchdog.look()) else []
    return said


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ranks/0").mkdir(parents=True)
    (tmp_path / "ranks/0/stdout.log").write_text("x")
    return tmp_path


def test_silence_is_reported_once_and_again_after_progress(folder, clock):
    watchdog = Watchdog(folder, 10)
    watchdog.watch({0: 1})
    assert looks(watchdog, clock, 9) == []
    assert len(looks(watchdog, clock, 20)) == 1
    (folder / "ranks/0/stdout.log").write_text("more")
    assert looks(watchdog, clock, 9) == []
    assert len(looks(watchdog, clock, 20)) == 1


def test_steps_and_output_count_as_progress(folder, clock):
    watchdog = Watchdog(folder, 10)
    watchdog.watch({0: 1})
    for number in range(6):
        if number % 2:
            (folder / "ranks/0" / HEARTBEAT).write_bytes(
                LAYOUT.pack(2, number, 0)
            )  # of another process: no signal
        else:
            (folder / "ranks/0/stderr.log").write_text("y" * number)
        assert looks(watchdog, clock, 8) == []


def test_zero_seconds_are_never(folder, clock):
    watchdog = Watchdog(folder, 0)
    watchdog.watch({0: 1})
    assert looks(watchdog, clock, 50) == []
    assert not (folder / "ranks/0" / STACK).exists()
