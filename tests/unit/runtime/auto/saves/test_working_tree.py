"""Another rank than 0 sees its own ordinary files and what rank 0 has; the tree is as rank 0 leaves it."""
# ruff: noqa: PTH102, PTH103, PTH104, PTH105, PTH107, PTH123, PTH202, PTH208, PTH211

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.auto import working_tree
from fsdplaunch.runtime.auto.working_tree import WorkingTree, rank_0_having_the_tree
from fsdplaunch.runtime.state_dict.gather import files_of_ranks


@pytest.fixture
def other_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkingTree]:
    """Rank 1 of a plain script, in a folder in which rank 0 has a log."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(working_tree, "PATIENCE_SECONDS", 0.05)
    (tmp_path / "log.txt").write_text("of rank 0\n")
    ownership: Any = SimpleNamespace(ours=True, ranked=False)
    with rank_0_having_the_tree(tree := WorkingTree(ownership, 1)):
        yield tree


def in_tree() -> dict[str, str]:
    """Return what is really there."""
    found = {}

    def look() -> None:  # a thread's files are everybody's
        found.update({path.name: path.read_text() for path in Path().iterdir() if path.is_file()})

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found


@pytest.mark.usefixtures("other_rank")
def test_file_of_this_run_is_one_though_the_clock_was_set_back_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited: list[str] = []
    monkeypatch.setattr(working_tree, "_is_being_written", lambda place: bool(awaited.append(place)))
    an_hour_ago = time.time() - 3600
    os.utime("log.txt", (an_hour_ago, an_hour_ago))
    assert Path("log.txt").read_text() == "of rank 0\n"
    assert awaited == []  # rank 0 had written it long before
    monkeypatch.setattr(time, "time", lambda: an_hour_ago)
    assert Path("log.txt").read_text() == "of rank 0\n"
    assert len(awaited) == 1


@pytest.mark.usefixtures("other_rank")
def test_what_rank_0_has_is_removed_and_renamed_by_rank_0(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    os.remove("log.txt")
    log.unlink()
    log.rename("old.txt")
    Path("part").write_text("mine")
    os.replace("part", "whole")
    assert Path("whole").read_text() == "mine"
    os.makedirs("out")
    os.mkdir("out")
    shutil.rmtree("out")
    assert Path("out").is_dir()
    with pytest.raises(FileNotFoundError):
        os.rename("never", "there")
    os.unlink("whole")  # noqa: PTH108
    for refused in (lambda path: os.symlink(path, "latest"), lambda path: os.truncate(path, 0)):
        with pytest.raises(CheckpointError, match=r"test_working_tree.py:\d+: os\.\w+ of .* on rank 1"):
            refused(log)
    assert in_tree() == {"log.txt": "of rank 0\n"}


def test_outside_of_the_tree_and_in_saves_of_all_ranks_every_rank_writes(
    other_rank: WorkingTree, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "a.txt").write_text("a")
    Path(".cache").mkdir()
    Path(".cache/b.txt").write_text("b")
    with files_of_ranks():
        Path("shard-1").write_text("c")
    assert in_tree() == {"log.txt": "of rank 0\n", "shard-1": "c"}
    assert os.path.getsize(".cache/b.txt") == os.path.getsize(elsewhere / "a.txt") == 1
    other_rank.adopt(elsewhere / "b.txt")
    with open(elsewhere / "b.txt", "w") as file:
        file.write("d")
    assert os.listdir(elsewhere) == ["a.txt"]
