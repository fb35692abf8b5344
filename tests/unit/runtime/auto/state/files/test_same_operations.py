"""When a rank asks the others whether they have done what fails here."""

import os
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdplaunch.runtime.auto.state.files import path_store
from fsdplaunch.runtime.auto.state.files.same_operations import counting_for_all


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the keys that this rank asked the run's store for."""
    store = dist.HashStore()
    keys: list[str] = []

    class Recorded:
        def add(self, key: str, amount: int) -> int:
            keys.append(key)
            return store.add(key, amount)

    monkeypatch.setattr(path_store, "store", Recorded)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    return keys


def test_a_folder_that_may_be_there_asks_nobody(asked: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "out" / "images"
    folder.mkdir(parents=True)
    with counting_for_all(2):
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103  (what scripts call)
        folder.mkdir(exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
    assert asked == []


def test_a_folder_that_must_not_be_there_counts_where_another_rank_made_it(
    asked: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    _make(folder)
    _make(folder)  # the other rank, which has made none
    with counting_for_all(2), pytest.raises(FileExistsError):
        folder.mkdir()  # nor has another rank at this line
    assert len(set(asked)) == 2  # each call that may be another rank's


def test_a_name_that_is_no_text_is_made_as_well(asked: list[str], tmp_path: Path) -> None:
    with counting_for_all(2):
        (tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    assert [os.fsencode(path.name) for path in tmp_path.iterdir()] == [b"caf\xe9"]
    assert len(asked) == 2


def test_what_another_rank_is_doing_is_waited_for(asked: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with ThreadPoolExecutor(1) as other:
        _make(folder)
        key, store = asked[0], path_store.store()
        store.add(key, 1 - (1 << 32))  # made, and yet to be counted
        waiting = other.submit(_make, folder)
        assert not wait([waiting], timeout=0.3).done
        store.add(key, (1 << 32) - 1)
        assert waiting.result(timeout=20) is None


def _make(folder: Path) -> None:
    """Make a folder as each rank does, at one line."""
    with counting_for_all(2):
        folder.mkdir()


def _take(folder: Path) -> bool:
    """Take a lock."""
    with counting_for_all(2):
        try:
            folder.mkdir()
        except FileExistsError:
            return False
    return True


def test_what_the_script_waits_for_is_no_other_ranks(asked: list[str], tmp_path: Path) -> None:
    assert _take(tmp_path / "lock")
    assert not _take(tmp_path / "lock")  # the other rank
    assert asked == []
