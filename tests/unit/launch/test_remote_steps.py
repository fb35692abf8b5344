"""A node's steps in one message: what node 0 sees of them, and that nothing in them can end a run."""

import json
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdplaunch.files import matches
from fsdplaunch.launch.coordination.protocol import TO_COORDINATOR, decode
from fsdplaunch.launch.coordination.run_control import attach
from fsdplaunch.launch.remote_steps import NODE_STEPS, ROW, packed, unpacked
from fsdplaunch.launch.step_summary import read_ranks, summarize
from fsdplaunch.run_dir import rank_folder, write_json
from fsdplaunch.step_record import RankSteps, Step
from tests.fake_runs import Times, even, slow, write_steps


def node(folder: Path, ranks: range, times: Times, steps: int = 60) -> dict[int, RankSteps]:
    for rank in ranks:
        write_steps(rank_folder(folder, rank), rank, steps, times)
    return read_ranks(folder)


def sent(ranks: dict[int, RankSteps]) -> list[dict]:
    line = json.dumps({"kind": "steps", "ranks": packed(ranks)}).encode()
    assert len(line) < 1200 * len(ranks)
    return decode(line, TO_COORDINATOR)["ranks"]


@pytest.mark.parametrize(("times", "seconds"), [(even, 0.1), (slow(3), 0.31)])
def test_node_0_sees_the_other_nodes_ranks_as_its_own(tmp_path, times, seconds):
    """Medians to five digits, and the slow rank wherever it is."""
    own = node(tmp_path / "own", range(2), times)
    others = node(tmp_path / "other", range(2, 4), times)
    write_json_of(
        tmp_path / "own", {rank: one._replace(total=90, memory_limit=2**40) for rank, one in others.items()}
    )
    found, whole = read_ranks(tmp_path / "own"), {**own, **read_ranks(tmp_path / "other")}
    assert list(found) == [0, 1, 2, 3]
    seen, true = summarize(found).to_dict(), summarize(whole).to_dict()
    assert (seen["steps_total"], seen["memory_limit"]) == (90, 2**40)
    assert seen["step_seconds"] == pytest.approx(seconds, rel=1e-4)
    assert (seen["step"], seen["bound_by"]) == (60, true["bound_by"])
    assert seen["samples_per_second"] == pytest.approx(true["samples_per_second"], rel=1e-4)
    assert seen["slowest"] == (true["slowest"] and {**true["slowest"], "factor": pytest.approx(3.0, rel=1e-2)})
    for one, other in zip(seen["ranks"], true["ranks"], strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def write_json_of(run_dir: Path, ranks: dict[int, RankSteps]) -> None:
    (run_dir / "node1").mkdir()
    write_json(run_dir / "node1" / NODE_STEPS, {"ranks": sent(ranks)})


def test_short_steps_are_sent_far_apart_by_numbers_that_all_ranks_choose_alike(tmp_path):
    found = unpacked(sent(node(tmp_path, range(2), lambda rank, number: {"seconds": 0.01}, steps=250)))
    numbers = [[step.number for step in steps.recent] for steps in found.values()]
    assert numbers[0] == numbers[1] == list(range(96, 250, 8))


def test_a_nodes_own_records_count_more_than_what_it_has_sent(tmp_path):
    write_json_of(tmp_path, node(tmp_path / "other", range(2, 4), even, steps=30))
    node(tmp_path / "node1", range(2, 4), even, steps=50)
    assert {rank: steps.made for rank, steps in read_ranks(tmp_path).items()} == {2: 50, 3: 50}


@pytest.mark.parametrize("value", [nan, inf, -inf, -1.0, 1e300])
def test_whatever_a_script_does_to_its_record_a_message_is_one(value):
    step = Step(*[value] * 11)
    ranks = {0: RankSteps(1, 2**64 - 1, value, [step, Step(1, 1, 0.5, value, value, value, value)], [step])}
    assert matches(packed(ranks), [ROW])


@given(rows=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*ROW, "x"]), inner), max_leaves=30,
))  # fmt: skip
def test_whatever_stands_in_the_file_is_read_or_left(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("node")
    (folder / "node1").mkdir()
    (folder / "node1" / NODE_STEPS).write_text(json.dumps({"ranks": rows}))
    summarize(read_ranks(folder))


def attached(run_dir: Path) -> SimpleNamespace:
    """A launcher's part with its actions, without connections."""
    control = SimpleNamespace(start=lambda: None, assignment=SimpleNamespace(change=0, place=0, nodes=2))
    run_dir.mkdir(exist_ok=True)
    attach(control, SimpleNamespace(send_signal=lambda number: None), run_dir, ["SIGTERM"])
    return control.actions


def test_node_0_keeps_what_others_send_unless_their_records_are_there(tmp_path):
    other = attached(tmp_path / "elsewhere")
    assert other.steps() == []
    node(tmp_path / "elsewhere", range(1, 2), even)
    own = attached(tmp_path / "run")
    own.keep_steps(1, other.steps())
    assert list(read_ranks(tmp_path / "run")) == [1]
    (tmp_path / "run/node2/ranks").mkdir(parents=True)
    own.keep_steps(2, other.steps())
    assert not (tmp_path / "run/node2" / NODE_STEPS).exists()
    (tmp_path / "run/node3").write_text("a file in its place")
    own.keep_steps(3, other.steps())  # is no reason to end a run
    (tmp_path / "elsewhere/ranks/1/steps").write_bytes(b"fsdpstp2" + b"\xff" * 70000)
    assert decode(json.dumps({"kind": "steps", "ranks": other.steps()}).encode(), TO_COORDINATOR)
