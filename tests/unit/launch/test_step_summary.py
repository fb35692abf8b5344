"""What bounds a run and which rank is slow, from records of steps."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from fsdplaunch.launch.step_summary import end_lines, read_ranks, summarize
from fsdplaunch.run_dir import node_folder, rank_folder
from fsdplaunch.step_record import RankSteps, Step, StepWriter


def training(
    own: Sequence[float],
    *,
    steps: int = 30,
    data: Sequence[float] = (),
    network: float = 0.001,
    noise: float = 0.05,
) -> dict[int, RankSteps]:
    """Make records of synchronous training: each rank's own seconds, of these for data; the rest it waits."""
    draw = random.Random(4)
    kept: list[list[Step]] = [[] for _ in own]
    now = 0.0
    for number in range(1, steps + 1):
        times = [each * draw.uniform(1 - noise, 1 + noise) for each in own]
        length = max(times) + network
        now += length
        for rank, time in enumerate(times):
            waited = data[rank] if data else 0.0
            kept[rank].append(Step(number, now, length, waited, length - time, 5e6, 7e6, 8, 8 * 128))
    return {rank: RankSteps(1, steps, now, each, each) for rank, each in enumerate(kept)}


def test_a_slow_rank_is_named_with_its_cause() -> None:
    found = summarize(training([0.01, 0.01, 0.02, 0.01]))
    assert found.bound_by == "straggler"
    assert found.slowest is not None
    assert (found.slowest.rank, found.slowest.cause) == (2, "compute")
    assert found.slowest.factor == pytest.approx(2, rel=0.1)
    starved = summarize(training([0.01, 0.02, 0.01], data=[0.001, 0.011, 0.001])).slowest
    assert starved is not None
    assert (starved.rank, starved.cause) == (1, "input")


@pytest.mark.parametrize(
    "own", [[0.01] * 4, [0.01, 0.01, 0.02, 0.02], [0.0002, 0.0002, 0.0005, 0.0002]], ids=["even", "two", "tiny"]
)
def test_nobody_is_named_without_one_that_is_clearly_slower(own: list[float]) -> None:
    found = summarize(training(own))
    assert found.slowest is None
    assert found.bound_by != "straggler"


def test_one_odd_step_names_nobody() -> None:
    ranks = training([0.01] * 4)
    odd = [step._replace(peer_seconds=0.0) if step.number % 2 else step for step in ranks[3].recent]
    assert summarize({**ranks, 3: ranks[3]._replace(recent=odd)}).slowest is None


def test_what_bounds_a_run_without_a_slow_rank() -> None:
    assert summarize(training([0.01] * 2, data=[0.006] * 2)).bound_by == "input"
    assert summarize(training([0.01] * 2, network=0.02)).bound_by == "communication"
    assert summarize(training([0.01] * 2)).bound_by == "compute"
    ranks = training([0.01] * 2)
    for limit, bound in ((7_000_000, "memory"), (70_000_000, "compute")):
        found = summarize(ranks | {1: ranks[1]._replace(memory_limit=limit)})
        assert (found.bound_by, found.to_dict()["memory_limit"]) == (bound, limit)
    uneven = {0: ranks[0]._replace(memory_limit=70_000_000), 1: ranks[1]._replace(memory_limit=6_000_000)}
    small = [step._replace(peak_bytes=5e6) for step in ranks[1].recent]
    found = summarize(uneven | {1: uneven[1]._replace(recent=small)})
    assert (found.bound_by, found.memory_limit) == (
        "compute",
        6_000_000,
    )  # the other rank's 7 MB are on a larger GPU
    assert summarize(training([0.01, 0.02], steps=5)).bound_by is None


def test_rates_agree_with_the_median_that_is_shown() -> None:
    found = summarize(training([0.01, 0.013]))
    assert found.step_seconds is not None
    assert found.steps_per_second == 1 / found.step_seconds
    assert found.samples_per_second == pytest.approx(2 * 8 / found.step_seconds)
    assert found.tokens_per_second == pytest.approx(2 * 8 * 128 / found.step_seconds)


def test_plain_data_has_what_programs_read() -> None:
    found = summarize(training([0.01, 0.03])).to_dict()
    assert found["slowest"]["rank"] == 1
    assert set(found["ranks"][0]) == {
        *("rank", "step", "step_seconds", "data_seconds", "peer_seconds", "memory_bytes", "peak_bytes")
    }
    assert found["ranks"][1]["memory_bytes"] == 5_000_000


def test_lines_at_the_end_say_how_fast_what_was_waited_for_and_who_is_slow() -> None:
    even = training([0.01] * 4, data=[0.001] * 4, noise=0.0)
    assert end_lines(summarize(even)) == [
        "30 steps, 11.0 ms a step, 90.9 steps/s, 2,909 samples/s, 372,364 tokens/s",
        "9 % waiting for data, 9 % waiting for others",
        "memory 6.7 MiB at most, on each rank",
    ]
    last = end_lines(summarize(training([0.01, 0.01, 0.03, 0.01], noise=0.0)))[-1]
    assert last == "rank 2 is slow (compute): 3.0 times the others' own time, and they wait for it"
    full = {rank: steps._replace(memory_limit=7_000_000) for rank, steps in even.items()}
    assert end_lines(summarize(full))[-1] == "the step is compute-bound, and the memory is nearly full"
    counted_only = {0: even[0]._replace(recent=[], history=[])}
    assert end_lines(summarize(counted_only)) == []


def test_a_run_without_records_or_steps(tmp_path: Path) -> None:
    assert summarize(read_ranks(tmp_path)).to_dict() == {
        "step": 0,
        **dict.fromkeys(["step_seconds", "steps_per_second", "samples_per_second", "tokens_per_second"]),
        **dict.fromkeys(["steps_total", "memory_limit", "bound_by"]),
        "slowest": None,
        "ranks": [],
    }
    folder = rank_folder(tmp_path, 0)
    folder.mkdir(parents=True)
    StepWriter(folder)
    [row] = summarize(read_ranks(tmp_path)).ranks
    assert (row.step, row.step_seconds, row.memory_bytes) == (0, None, None)


def test_ranks_of_all_nodes_are_read(tmp_path: Path) -> None:
    for rank, node in [(0, 0), (1, 1), (10, 2)]:
        folder = rank_folder(node_folder(tmp_path, node), rank)
        folder.mkdir(parents=True)
        StepWriter(folder).count(float(rank))
    (tmp_path / "ranks" / "1x").mkdir()
    assert {rank: steps.ended for rank, steps in read_ranks(tmp_path).items()} == {0: 0.0, 1: 1.0, 10: 10.0}
