"""What a rank that comes late may remove."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fsdplaunch.runtime.auto.state.files import fresh_folders, path_store
from fsdplaunch.runtime.auto.state.files.fresh_folders import keeping_fresh_folders


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the contexts of two ranks of a script for one process."""
    store = dist.HashStore()
    monkeypatch.setattr(path_store, "store", lambda: store)
    monkeypatch.setattr(fresh_folders, "speaks_of_ranks", lambda: False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    return [SimpleNamespace(rank=rank, size=2, ownership=SimpleNamespace(ranked=False)) for rank in range(2)]


def _begin(folder: Path, rank: int, *, empty: bool = True) -> None:
    if empty:
        shutil.rmtree(folder)
    os.makedirs(folder / "logs", exist_ok=True)  # noqa: PTH103
    (folder / f"{rank}.txt").touch()


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("old", [False, True])
def test_a_late_rank_leaves_what_another_has_made(ranks: list[Any], tmp_path: Path, *, old: bool) -> None:
    out = tmp_path / "out"
    if old:
        out.mkdir()
        (out / "old.txt").touch()
    for context in ranks:
        with keeping_fresh_folders(context):  # the first finds no folder, or an old one
            _begin(out, context.rank, empty=old or context.rank > 0)
    assert _names(out) == {"logs", "0.txt", "1.txt"}


def test_a_rank_removes_what_it_has_made_or_found_made(ranks: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for context in ranks:
        with keeping_fresh_folders(context):
            _begin(out, context.rank, empty=False)
            shutil.rmtree(out)  # before the other has come
            assert not out.exists()
    with keeping_fresh_folders(ranks[0]):
        _begin(out, 0, empty=False)
    with keeping_fresh_folders(ranks[1]):
        out.mkdir(exist_ok=True)
        shutil.rmtree(out)
    assert not out.exists()


def test_a_folder_of_the_same_name_that_another_program_made_is_removed(ranks: list[Any], tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    with keeping_fresh_folders(ranks[0]):
        _begin(out, 0, empty=False)
        out.rename(tmp_path / "moved")
        other.rename(out)
    with keeping_fresh_folders(ranks[1]):
        shutil.rmtree(out)
    assert not out.exists()


def test_scripts_that_look_at_ranks_remove_what_they_say(
    ranks: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh_folders, "speaks_of_ranks", lambda: True)
    with keeping_fresh_folders(ranks[0]):
        _begin(tmp_path / "out", 0, empty=False)
    with keeping_fresh_folders(ranks[1]):
        shutil.rmtree(tmp_path / "out")
    assert not (tmp_path / "out").exists()
