"""Which rank's text is in a file that a script for one process writes on every rank."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fsdplaunch.runtime.auto.state.files import path_store, written_files
from fsdplaunch.runtime.auto.state.files.written_files import writing_once


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the contexts of two ranks of a script for one process."""
    store = dist.HashStore()
    monkeypatch.setattr(path_store, "store", lambda: store)
    monkeypatch.setattr(written_files, "_PATIENCE_SECONDS", 0.01)
    for words in ("speaks_of_ranks", "excludes_others"):
        monkeypatch.setattr(written_files, words, lambda: False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    return [SimpleNamespace(rank=rank, size=2, ownership=SimpleNamespace(ranked=False)) for rank in range(2)]


@pytest.mark.parametrize("mode", ["a", "w", "x"])
def test_a_file_holds_what_rank_0_wrote_once(
    ranks: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    log = tmp_path / "log.csv"
    for context in ranks:
        with writing_once(context), open(log, mode) as file:  # noqa: PTH123
            file.write(f"rank {context.rank}\n")
            assert file.name == str(log)
    assert log.read_text() == "rank 0\n"
    assert f"rank 0 alone writes {os.path.relpath(log)} and other text files" in capsys.readouterr().err


def test_what_is_never_closed_is_written_too(ranks: list[Any], tmp_path: Path) -> None:
    for context in ranks:
        with writing_once(context):
            open(tmp_path / "log", "a").write(f"{context.rank}")  # noqa: PTH123, SIM115
            (tmp_path / "other").write_text(f"{context.rank}")
    assert (tmp_path / "log").read_text() == (tmp_path / "other").read_text() == "0"


def test_a_file_that_rank_0_does_not_open_is_written_by_those_that_do(ranks: list[Any], tmp_path: Path) -> None:
    with writing_once(ranks[1]):
        (tmp_path / "own").write_text("1")
    assert (tmp_path / "own").read_text() == "1"


def test_a_file_that_was_there_before_cannot_be_created(ranks: list[Any], tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    for context in ranks:
        with writing_once(context), pytest.raises(FileExistsError):
            _create(tmp_path / "old")


def test_a_lock_is_one_ranks(ranks: list[Any], tmp_path: Path) -> None:
    got = []
    for context in ranks:
        with writing_once(context):
            try:
                with open(tmp_path / "lock", "x") as file:  # noqa: PTH123
                    got.append((context.rank, file.name))
            except FileExistsError:
                got.append((context.rank, None))
    assert got == [(0, str(tmp_path / "lock")), (1, None)]


@pytest.mark.parametrize("mode", ["a", "ab"])
def test_a_late_rank_leaves_the_file_that_another_has_begun(ranks: list[Any], tmp_path: Path, mode: str) -> None:
    log = tmp_path / "log"
    log.write_text("of an earlier run")
    for context in ranks:
        with writing_once(context):
            os.remove(log)  # noqa: PTH107
            with open(log, mode) as file:  # noqa: PTH123
                file.write("begun" if mode == "a" else b"begun")
    assert log.read_text() == ("begun" if mode == "a" else "begunbegun")


def test_scripts_that_look_at_ranks_or_lock_files_write_what_they_say(
    ranks: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, words in enumerate(("speaks_of_ranks", "excludes_others")):
        monkeypatch.setattr(written_files, words, lambda: True)
        for context in ranks:
            with writing_once(context), open(tmp_path / f"{number}", "a") as file:  # noqa: PTH123
                file.write(str(context.rank))
        assert (tmp_path / f"{number}").read_text() == "01"
        monkeypatch.setattr(written_files, words, lambda: False)


def test_a_log_that_is_opened_at_every_step_keeps_few_keys(
    ranks: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written_files, "_REMEMBERED", 3)
    keys = []
    with writing_once(ranks[0]):
        for _ in range(8):
            with open(tmp_path / "log", "a") as file:  # noqa: PTH123
                file.write("x")
            keys.append(path_store.store().num_keys())
    assert keys[1] < keys[2] == keys[-1]
    assert (tmp_path / "log").read_text() == "x" * 8


def _create(path: Path) -> None:
    with open(path, "x") as file:  # noqa: PTH123
        file.write("new")
