"""Who is behind, read from records of steps and from stacks as faulthandler writes them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdplaunch.agent.watchdog import Watchdog, describe_stall, read_position
from fsdplaunch.run_dir import STACK
from fsdplaunch.step_record import StepWriter

WAITING = """Thread 0x00007f3b (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f3c (most recent call first):
  File "/v/lib/python3.11/site-packages/fsdplaunch/runtime/measuring.py", line 200 in wait
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3021 in all_reduce
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 90 in step
  File "/home/me/train.py", line 120 in <module>
"""
ELSEWHERE = """Current thread 0x00007f3c (most recent call first):
  File "/home/me/data.py", line 12 in load_batch
  File "/home/me/train.py", line 88 in step
"""


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([(3, WAITING), (3, ELSEWHERE)], "1 rank waits for rank 1 (step 3, data.py:12 in load_batch)"),
        (
            [(5, WAITING), (5, WAITING), (4, WAITING), (5, WAITING)],
            "3 ranks wait for rank 2 (step 4, train.py:90 in step)",
        ),
        (
            [(3, ELSEWHERE), (3, ELSEWHERE)],
            "all ranks are at the same place: rank 0 (step 3, data.py:12 in load_batch)",
        ),
        (
            [(3, ELSEWHERE), (3, ELSEWHERE.replace("data.py", "item.py"))],  # two lines that read from a GPU
            "ranks are at different lines: "
            + ", ".join(
                f"rank {n} (step 3, {file}:12 in load_batch)" for n, file in enumerate(("data.py", "item.py"))
            ),
        ),
        ([(0, WAITING), (None, "")], "1 rank waits for rank 1 (does not answer)"),
    ],
    ids=["not in the collective", "fewer steps", "alike", "at two lines", "no answer"],
)
def test_ranks_that_the_others_wait_for_are_named_with_the_users_innermost_line(ranks, found):
    positions = [read_position(rank, steps, dump) for rank, (steps, dump) in enumerate(ranks)]
    line = describe_stall(positions, 600, run_dir=Path("runs/x"))
    assert (
        line
        == f"no rank has made a step or printed anything for 600 s: {found}; stacks in runs/x/ranks/*/stack.txt"
    )


@pytest.fixture
def looks(tmp_path, monkeypatch):
    """Returns a function that gives what a watchdog says in so many seconds, and the folder of its only rank."""
    (tmp_path / "ranks/0").mkdir(parents=True)
    now = [1000.0]
    monkeypatch.setattr("fsdplaunch.agent.watchdog.time", SimpleNamespace(monotonic=lambda: now[0]))

    def make(limit: float):
        watchdog = Watchdog(tmp_path, limit)
        watchdog.watch({0: 1})

        def look(seconds: float) -> list[str]:
            said = []
            for _ in range(int(seconds * 2)):
                now[0] += 0.5
                said += [line] if (line := watchdog.look()) else []
            return said

        return look, tmp_path / "ranks/0"

    return make


def test_silence_is_reported_once_and_again_after_progress(looks):
    look, folder = looks(10)
    assert look(9) == []
    assert len(look(20)) == 1
    (folder / "stdout.log").write_text("more")
    assert look(9) == []
    assert len(look(20)) == 1


def test_steps_and_output_count_as_progress(looks):
    look, folder = looks(10)
    record = StepWriter(folder)
    for number in range(6):
        if number % 2:
            record.count(float(number))  # of another process than the watched one: no signal
        else:
            (folder / "stderr.log").write_text("y" * number)
        assert look(8) == []


def test_zero_seconds_are_never(looks):
    look, folder = looks(0)
    assert look(50) == []
    assert not (folder / STACK).exists()
