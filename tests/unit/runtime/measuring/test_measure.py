"""What a worker records of its steps, batches and waiting."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fsdplaunch.runtime.torch_internals import modules
from fsdplaunch.tune import measure
from fsdplaunch.tune.measure import BatchCount, first_tensor


def test_rows_and_tokens_are_those_of_the_first_tensor():
    count = BatchCount()
    count.count([torch.zeros(4, 3), torch.zeros(4)])
    assert (count.rows, count.tokens, count.shape) == (4, 0, None)
    count.count({"labels": torch.zeros(9), "input_ids": torch.zeros(2, 8, dtype=torch.long)})
    assert (count.rows, count.tokens, count.shape) == (6, 16, (2, 8))
    count.count(("text", {"x": 1}))
    count.count(torch.tensor(1.0))
    assert count.rows == 6
    assert first_tensor([]) is None


def test_every_loader_is_watched(monkeypatch):
    kind = type(iter(DataLoader(TensorDataset(torch.zeros(1, 1))))).__mro__[1]
    monkeypatch.setattr(kind, "__next__", kind.__next__)  # put back at the end
    seen = []
    modules.watch_batches(seen.append)
    assert len(list(DataLoader(TensorDataset(torch.zeros(10, 2)), batch_size=4))) == 3
    assert [len(batch[0]) for batch in seen] == [4, 4, 2]


def test_waiting_is_counted_once_where_a_call_makes_another(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def take(seconds):
        now[0] += seconds

    wait = measure.CollectiveWait()
    inner = wait._timed(lambda: take(2.0))
    wait._timed(lambda: (inner(), take(1.0)))()
    assert wait.seconds == 3.0
    with pytest.raises(ZeroDivisionError):
        wait._timed(lambda: (take(4.0), 1 / 0))()
    inner()
    assert wait.seconds == 9.0


def test_the_optimizer_that_steps_most_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "own_folder", lambda: tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    often, seldom = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    recorder = measure.Measurement(on_gpu=False, waits=False)
    for step in range(5):
        recorder._batches.count(torch.zeros(8, 16, dtype=torch.long))
        recorder._mark(often)
        if step == 0:
            recorder._mark(seldom)
    recorder.write()
    found = json.loads((tmp_path / "measured.json").read_text())
    assert found["steps"] == 5
    assert len(found["seconds"]) == 4
    assert found["rows"] == [8] * 4
    assert found["tokens"] == [128] * 4
    assert found["waits"] is None
    assert found["memory"] > found["start"] / 2 > 0
    assert found["model"]["tensors"] == {"0.weight": [[3, 4], 4], "0.bias": [[3], 4]}
    assert found["model"]["optimizer"] == "sgd"
    assert found["model"]["batch"] == [8, 16]


def test_a_gpu_is_asked_for_the_time_of_its_own_events(monkeypatch):
    from fsdplaunch.tune.measure import StepClock

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

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=Event))
    clock = StepClock(on_gpu=True)
    for _ in range(3):
        clock.mark()
    assert clock.seconds() == [0.003, 0.007]
    assert clock._marks[-1].waited
