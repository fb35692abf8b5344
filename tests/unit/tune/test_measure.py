"""What a worker records of its steps."""

import json
from types import SimpleNamespace

import torch

from fsdplaunch.tune import measure


def test_the_optimizer_that_steps_most_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "own_folder", lambda: tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    often, seldom = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    recorder = measure.Measurement(on_gpu=False)
    for step in range(5):
        recorder.mark(often)
        if step == 0:
            recorder.mark(seldom)
    recorder.write()
    found = json.loads((tmp_path / "measured.json").read_text())
    assert found["steps"] == 5
    assert len(found["seconds"]) == 4
    assert found["memory"] > 1 << 20


def test_a_gpu_is_asked_for_the_time_of_its_own_events(monkeypatch, tmp_path):
    moments = iter([10.0, 13.0, 20.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(moments)

        def synchronize(self):
            self.waited = True

        def elapsed_time(self, after):
            assert after.at > self.at
            return after.at - self.at

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=Event, max_memory_allocated=lambda: 7))
    monkeypatch.setattr(measure, "own_folder", lambda: tmp_path)
    recorder = measure.Measurement(on_gpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for _ in range(3):
        recorder.mark(optimizer)
    recorder.write()
    found = json.loads((tmp_path / "measured.json").read_text())
    assert found["seconds"] == [0.003, 0.007]
    assert found["memory"] == 7
