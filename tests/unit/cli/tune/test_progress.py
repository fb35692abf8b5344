"""How a search is shown where there is no terminal: a line per launch, and one every ten seconds."""

import time
from types import SimpleNamespace

import pytest

from fsdplaunch.cli import tune as shown
from fsdplaunch.run_dir import HEARTBEAT, LAYOUT, rank_folder
from fsdplaunch.tune.search import Row
from fsdplaunch.tune.space import Candidate
from fsdplaunch.tune.trial import Outcome


class Said:
    quiet = True

    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


@pytest.fixture
def search():
    rows = {Candidate(): Row(candidate=Candidate())}
    return SimpleNamespace(rows=rows, predictor=SimpleNamespace(limit=None))


def test_each_launch_is_said_once(search, tmp_path):
    out, row = Said(), search.rows[Candidate()]
    progress = shown.SearchProgress(search, tmp_path, out)
    progress.changed()
    row.state = "running"
    progress.changed()
    assert out.lines == []
    for seconds in (0.2, 0.1):
        row.outcomes.append(Outcome(seconds=(seconds, seconds, seconds)))
        row.state = "measured"
        progress.changed()
        row.state = "slower"
        progress.changed()
    assert out.lines == [
        "  yours: 200.0 ms per step (200.0 ms to 200.0 ms)",
        "  yours: 100.0 ms per step (100.0 ms to 100.0 ms)",
    ]


def test_a_long_launch_says_how_far_it_is(search, tmp_path, monkeypatch):
    monkeypatch.setattr(shown, "LINE_SECONDS", 0.02)
    folder = rank_folder(tmp_path / "trials" / "007", 0)
    folder.mkdir(parents=True)
    (folder / HEARTBEAT).write_bytes(LAYOUT.pack(1, 4, 0))
    out = Said()
    progress = shown.SearchProgress(search, tmp_path, out)
    with progress.launching(Candidate(), 7, 10):
        end = time.monotonic() + 10
        while not out.lines and time.monotonic() < end:
            time.sleep(0.01)
    assert out.lines[0] == "  yours: step 4 of 13, 0 s"
