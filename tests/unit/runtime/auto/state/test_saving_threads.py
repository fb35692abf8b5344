"""A thread may gather while the main thread waits for it, and at no other time."""

import queue
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.auto.state import saving_threads
from fsdplaunch.runtime.auto.state.saving_threads import await_main_thread


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
    monkeypatch.setattr(saving_threads, "PATIENCE_SECONDS", 0.1)
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
