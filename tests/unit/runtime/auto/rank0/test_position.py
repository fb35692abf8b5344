"""Marks and copies of shards on a GPU, in their order; what stands for CUDA records what is asked of it."""

from contextlib import contextmanager

import pytest
import torch

from fsdplaunch.runtime.auto.rank0 import service
from fsdplaunch.runtime.auto.rank0.position import Position


def test_a_mark_is_seen_by_the_serving_thread_after_its_event_was_recorded(monkeypatch):
    position, published = Position(), []

    class Event:
        def record(self):
            published.append(len(position.marks))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    position.begin_pass()
    position.begin_step()
    assert published == [0, 1]
    assert [type(mark.event) for mark in position.marks] == [Event, Event]


@pytest.mark.parametrize("marked", [True, False], ids=["by its event", "by what is queued"])
def test_a_shard_is_copied_after_its_event_on_a_stream_of_its_own_and_its_own_gpu(monkeypatch, marked):
    asked = []

    class Shard:
        is_cuda, device = True, torch.device("cuda", 1)

        def detach(self):
            return self

        contiguous = detach

        def cpu(self):
            asked.append("copy")

    class Event:
        def synchronize(self):
            asked.append("wait for the mark")

        def record(self, stream):
            asked.append(f"mark {stream}")

        def query(self):
            asked.append("is it done?")
            return True

    @contextmanager
    def inside(what):
        asked.append(f"on {what}")
        yield

    monkeypatch.setattr(service, "local_tensor", lambda tensor: tensor)
    for name, stand_in in {
        "device": inside,
        "stream": inside,
        "Event": Event,
        "Stream": lambda device: f"a new stream of {device}",
        "default_stream": lambda device: f"the stream of {device}",
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    service.on_host(Shard(), Event() if marked else None)
    waits = ["wait for the mark"] if marked else ["mark the stream of cuda:1", "is it done?"]
    assert asked == ["on cuda:1", *waits, "on a new stream of cuda:1", "copy"]
