"""What another rank than 0 takes for a file that rank 0 may still be writing."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdplaunch.runtime.auto import working_tree
from fsdplaunch.runtime.auto.working_tree import WorkingTree, rank_0_having_the_tree


def test_file_of_this_run_is_one_though_the_clock_was_set_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log.txt").write_text("of rank 0\n")
    ownership: Any = SimpleNamespace(ours=True, ranked=False)
    with rank_0_having_the_tree(WorkingTree(ownership, 1)):
        awaited: list[str] = []
        monkeypatch.setattr(working_tree, "_is_being_written", lambda place: bool(awaited.append(place)))
        an_hour_ago = time.time() - 3600
        os.utime("log.txt", (an_hour_ago, an_hour_ago))
        assert Path("log.txt").read_text() == "of rank 0\n"
        assert awaited == []  # rank 0 had written it long before
        monkeypatch.setattr(time, "time", lambda: an_hour_ago)
        assert Path("log.txt").read_text() == "of rank 0\n"
        assert len(awaited) == 1
