"""A rank's record of its steps: the last ones whole, the run in parts, readable at any moment."""

from math import isnan
from pathlib import Path

import pytest

from fsdplaunch.step_record import HISTORY, RING, STEPS, Step, StepWriter, mean_step, read_steps


def write(folder: Path, count: int) -> None:
    writer = StepWriter(folder)
    for number in range(1, count + 1):
        writer.count(100.0 + number)
        writer.add(Step(number, 100.0 + number, 0.5 + number, data_seconds=0.25, peak_bytes=number))


@pytest.mark.parametrize("count", [0, 1, RING, RING + 3, 2 * HISTORY, 5 * HISTORY + 1])
def test_last_steps_one_by_one_and_all_in_parts(tmp_path: Path, count: int) -> None:
    write(tmp_path, count)
    read = read_steps(tmp_path)
    assert read is not None
    assert read.made == count
    assert [step.number for step in read.recent] == list(range(max(1, count - RING + 1), count + 1))
    assert len(read.history) <= HISTORY
    sizes = {
        int(after.number - before.number) for before, after in zip(read.history, read.history[1:], strict=False)
    }
    assert len(sizes) <= 2  # the parts that were joined, and none of another size
    if count:
        first = read.history[0]
        assert first.seconds == 0.5 + (first.number + 1) / 2  # the mean from step 1 on
        assert first.peak_bytes == first.number
        assert isnan(first.tokens)
        assert count - read.history[-1].number < max(sizes | {1})


def test_a_step_that_is_counted_before_it_is_measured(tmp_path: Path) -> None:
    writer = StepWriter(tmp_path)
    writer.count(7.0)
    read = read_steps(tmp_path)
    assert read is not None
    assert (read.made, read.ended, list(read.recent)) == (1, 7.0, [])


def test_mean_leaves_out_what_is_not_known() -> None:
    one, other = Step(1, 1.0, 1.0, peer_seconds=0.5), Step(2, 2.0, 3.0)
    assert mean_step([one, other])[:3] == (2, 2.0, 2.0)
    assert mean_step([one, other]).peer_seconds == 0.5


@pytest.mark.parametrize("data", [b"", b"short", bytes(10**5), b"fsdpstp2" + b"\xff" * 10**5])
def test_a_file_that_is_not_one(tmp_path: Path, data: bytes) -> None:
    (tmp_path / STEPS).write_bytes(data)
    assert read_steps(tmp_path) is None
