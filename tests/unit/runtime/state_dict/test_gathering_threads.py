"""A thread may gather while the main thread waits for it, and at no other time."""

import queue
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.state_dict import gather
from fsdplaunch.runtime.state_dict.gather import await_main_thread


def test_thread_goes_on_when_the_main_thread_waits_for_it() -> None:
    await_main_thread("save")
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(await_main_thread, "save")
        time.sleep(0.1)
        assert not saved.done()
        saved.result()
        last = pool.submit(await_main_thread, "save")
    assert last.exception() is None


@pytest.mark.parametrize("reading", [False, True], ids=["computing", "reading a queue"])
def test_thread_beside_a_main_thread_that_goes_on_is_an_error(
    monkeypatch: pytest.MonkeyPatch, reading: bool
) -> None:
    monkeypatch.setattr(gather, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(gather, "failed", [])  # which the next pass of this process would raise
    pool = ThreadPoolExecutor(1)
    saved = pool.submit(await_main_thread, "torch.save at train.py:3")
    while not saved.done():
        if reading:
            with pytest.raises(queue.Empty):
                queue.Queue().get(timeout=0.3)
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match=r"train\.py:3 gathers shards in another thread"):
        saved.result()
    pool.shutdown()


def test_gathered_tensors_are_plain_ones_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gather, "SMALLEST", 8)
    for value in (torch.randn(30, 7).bfloat16(), torch.tensor([True, False] * 9), torch.randn(4) * 1j):
        kept = gather.spooled(value)
        assert type(kept) is torch.Tensor
        assert kept.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
        assert (kept.dtype, kept.shape) == (value.dtype, value.shape)
        assert torch.equal(kept, value)
        kept.zero_()  # it may be written, too
        assert not kept.any()
    assert not list(tmp_path.iterdir())
    assert gather.spooled(small := torch.ones(1)) is small
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert gather.spooled(value) is value  # no room for it
