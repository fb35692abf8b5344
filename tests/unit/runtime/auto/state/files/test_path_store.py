"""What ranks tell each other of files, and what is left of it once the rank that keeps it has ended."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fsdplaunch.runtime.auto.state.files import path_store
from fsdplaunch.runtime.auto.state.files.fresh_folders import keeping_fresh_folders


def _keep_store(ready: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    ready.send(store.port)
    ready.recv()  # until it is killed


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> multiprocessing.Process:
    """Return the process that keeps the store of the group."""
    ready, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_keep_store, args=(there,))
    process.start()
    store = dist.TCPStore("127.0.0.1", ready.recv())
    monkeypatch.setattr(path_store, "store", lambda: store)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    yield process
    process.kill()


def _end(keeper: multiprocessing.Process) -> None:
    keeper.kill()
    keeper.join()


def test_ranks_know_what_others_noted(keeper: multiprocessing.Process) -> None:
    assert keeper.is_alive()
    assert path_store.noted("a") is None
    path_store.note("a", "here")
    assert (path_store.is_noted("a"), path_store.noted("a")) == (True, "here")
    assert path_store.wait_for_note("a")
    assert not path_store.wait_for_note("b", seconds=0.01)
    assert [path_store.count("c", 1), path_store.count("c", 2)] == [1, 3]
    assert [path_store.take("d", "", "0"), path_store.take("d", "", "1")] == ["0", "0"]
    path_store.forget("a", "d")
    assert not path_store.is_noted("a")


def test_a_store_that_has_ended_is_no_error(keeper: multiprocessing.Process) -> None:
    path_store.note("a", "here")
    _end(keeper)
    path_store.note("b")
    path_store.forget("a")
    assert not path_store.answers()
    assert not path_store.is_noted("a")
    assert path_store.noted("a") is None
    assert path_store.count("c", 1) == 0
    assert path_store.take("d", "", "1") is None
    assert not path_store.wait_for_note("a", seconds=60)  # at once


def test_a_folder_is_made_while_the_store_ends(
    keeper: multiprocessing.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir

    def made_late(path: Path) -> None:
        mkdir(path)
        _end(keeper)

    monkeypatch.setattr(os, "mkdir", made_late)
    with keeping_fresh_folders(SimpleNamespace(rank=1, size=2, ownership=SimpleNamespace(ranked=False))):
        os.mkdir(tmp_path / "out")  # noqa: PTH102
    assert (tmp_path / "out").is_dir()
