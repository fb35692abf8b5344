"""What a screen shows of a run, at any width and height, and what is said of its speed."""

import re
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from fsdplaunch.launch.runs import find_run
from fsdplaunch.launch.step_summary import bound_words
from fsdplaunch.probe.hardware import GpuUse
from fsdplaunch.watch import RunWatcher, Snapshot
from fsdplaunch.watch.view import log_line, screen
from tests.fake_runs import GIB, even, make_run, slow

HOSTILE = "a\x1b]0;title\x07\u202eb\x9b2J[red]"


def look(tmp_path: Path, **how) -> Snapshot:
    make_run(tmp_path, **how)
    return RunWatcher(find_run(tmp_path)).look()


def texts(seen: Snapshot, width: int, height: int, **more) -> list[str]:
    return [text for text, _ in screen(seen, width, height, **more)]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 24), (60, 12), (40, 10), (20, 5)])
def test_a_screen_of_any_size_is_filled_and_never_more(tmp_path, width, height):
    for ranks in (1, 64):
        seen = look(tmp_path / str(ranks), ranks=ranks, times=slow(min(3, ranks - 1)))
        lines = texts(seen, width, height)
        assert max(map(len, lines)) <= width
        assert len(lines) <= height or width < 40  # a sentence needs its lines
        assert texts(replace(seen, ranks={}, summary=replace(seen.summary, ranks=[])), width, height)


@pytest.mark.parametrize("width", [60, 80])
def test_no_word_is_broken(tmp_path, width):
    seen = look(tmp_path, ranks=8, steps=300, times=slow(2))
    whole = set(" ".join(texts(seen, 500, 24)).split())
    assert set(" ".join(texts(seen, width, 24)).split()) - whole <= {"▁", "█", "."} | {
        word for word in " ".join(texts(seen, width, 24)).split() if set(word) <= set("▁▂▃▄▅▆▇█")
    }


def test_of_many_ranks_the_slowest_come_first_and_the_others_are_counted(tmp_path):
    def times(rank: int, number: int) -> dict[str, float]:
        found = dict(slow(37)(rank, number))
        return found | {"peer_seconds": found["peer_seconds"] - 0.01 * (rank == 50)}

    lines = screen(look(tmp_path, ranks=64, times=times), 80, 24)
    first, second = (number for number, (text, _) in enumerate(lines) if re.match(r" *>?(37|50) +40 ", text))
    assert (lines[first][0].split()[0], lines[first][1]) == (">37", "yellow")
    assert second == first + 1
    shown = sum(bool(re.match(r" *>?\d+ +40 ", text)) for text, _ in lines)
    assert lines[-1][0] == f"{64 - shown} of 64 ranks not shown: none is slower"
    assert "rank 37 is slow (compute): 3.0 times the others' own time, and they wait for it" in [
        text for text, _ in lines
    ]


def test_few_ranks_stand_in_their_order_with_what_is_known_of_each(tmp_path):
    seen = look(tmp_path, ranks=2)
    seen = replace(seen, gpus={0: GpuUse(percent=97, celsius=61)})
    sizes = {0: 80 * GIB, 1: 8 * GIB}
    seen = replace(
        seen, ranks={rank: seen.ranks[rank]._replace(memory_limit=size) for rank, size in sizes.items()}
    )
    head, first, second = texts(seen, 100, 24)[-3:]
    assert head.split() == ["rank", "step", "time", "spread", "data", "others", "memory", "GPU"]
    assert " ".join(first.split()) == "0 40 100.0 ms ±0.0 ms 1 % 20 % 1.0/80.0 GiB 97 % 61 C"
    assert " ".join(second.split()) == "1 40 100.0 ms ±0.0 ms 1 % 20 % 1.1/8.0 GiB"
    narrow = texts(seen, 60, 24)[-2]
    assert " ".join(narrow.split()) == "0 40 100.0 ms 1 % 20 % 1.0/80.0 GiB 97 % 61 C"


def test_time_left_is_shown_while_a_run_goes_on_whose_length_is_known(tmp_path):
    seen = look(tmp_path, ranks=2)
    assert (seen.seconds_left, "left" in log_line(seen)) == (None, False)
    seen = replace(seen, summary=replace(seen.summary, steps_total=1000), run=replace(seen.run, unfinished=True))
    assert seen.to_dict()["seconds_left"] == seen.seconds_left == pytest.approx(0.1 * (1000 - 40))
    first, second = texts(seen, 100, 24)[:2]
    assert first.endswith(", about 1 m 36 s left")
    assert second.startswith("step 40 of 1000  100.0 ms a step")
    assert replace(seen, run=replace(seen.run, unfinished=False)).seconds_left is None
    evaluated = replace(seen, summary=replace(seen.summary, steps_total=40))  # its steps are made, and it goes on
    assert (evaluated.seconds_left, "left" in log_line(evaluated)) == (None, False)


def test_chart_has_the_history_of_the_run(tmp_path):
    seen = look(tmp_path, ranks=1, steps=600, times=lambda rank, number: {"seconds": 0.1 if number < 300 else 0.2})
    lines = texts(seen, 80, 24)
    top = next(line for line in lines if line.endswith(" 200.0 ms"))
    bars = top.removesuffix(" 200.0 ms")
    assert re.fullmatch(r" {34,36}[▁-█]?█{34,36}", bars)


@pytest.mark.parametrize(
    ("times", "bound", "said"),
    [
        (even, "compute", "the step is compute-bound"),
        ({"data_seconds": 0.06}, "input", "the step is input-bound: ranks wait 60 % of it for the next batch"),
        (
            {"peer_seconds": 0.05},
            "communication",
            "the step is communication-bound: 50 % or more on each rank",
        ),
        (slow(1), "straggler", "rank 1 is slow (compute): 3.0 times the others' own time, and they wait for it"),
    ],
)
def test_one_sentence_says_what_bounds_the_step(tmp_path, times, bound, said):
    changed = times if callable(times) else lambda rank, number: {**even(rank, number), **times}
    seen = look(tmp_path, ranks=4, times=changed)
    assert seen.to_dict()["bound_by"] == bound
    assert bound_words(seen.summary) == said
    assert log_line(seen).endswith(f"; {said}")


def test_a_run_without_steps_says_so(tmp_path):
    seen = look(tmp_path, ranks=0)
    assert (
        log_line(seen) == "done, 2 m 05 s, no rank has made a step yet; too few steps yet to say what bounds them"
    )
    assert seen.to_dict()["ranks"] == []


def test_what_nobody_can_mean_neither_ends_a_look_nor_steers_the_terminal(tmp_path):
    bad = (nan, inf, -inf, 1e308, -1.0, 0.0)

    def times(rank: int, number: int) -> dict[str, float]:
        value = bad[(number + rank) % len(bad)]
        return {"seconds": 0.1 if number % 2 else value, "data_seconds": value, "peer_seconds": value,
                "memory_bytes": value, "samples": value}  # fmt: skip

    make_run(tmp_path, ranks=3, times=times, plan={"script": HOSTILE, "gpus": HOSTILE, "workers": -3}, runs=True)
    (tmp_path / "latest/ranks/0/stdout.log").write_text(HOSTILE)
    watcher = RunWatcher(find_run(tmp_path))
    seen = watcher.look()
    for width in (60, 80):
        lines = [*texts(seen, width, 24), *texts(seen, width, 24, print_of=watcher.last_line), log_line(seen)]
        assert not re.search("[\x00-\x1f\x7f-\x9f\u202e]", "".join(lines))
