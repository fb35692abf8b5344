"""What a worker writes of its steps: on the CPU with torch itself, on a GPU with events that stand for its own."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

from fsdplaunch.runtime import measuring
from fsdplaunch.runtime.measuring import GpuClock, Measuring
from fsdplaunch.runtime.patch import wrap, wrap_once_imported
from fsdplaunch.runtime.torch_internals.tensors import NEXT_BATCH, STATE_BEGUN
from fsdplaunch.step_record import RankSteps, StepWriter, read_steps


def optimizer(kind: Callable[..., Any] = torch.optim.SGD) -> torch.optim.Optimizer:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    return kind([param], lr=0.1)  # type: ignore[no-any-return]


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[Measuring]:
    """Measures optimizers' steps into a record in the test's folder."""
    found = Measuring(StepWriter(tmp_path))
    with register_optimizer_step_post_hook(found.note_step):
        yield found


def record(folder: Path) -> RankSteps:
    found = read_steps(folder)
    assert found is not None
    return found


ROUNDS: dict[str, tuple[Sequence[int], int]] = {
    "one optimizer": ([0, 0, 0, 0], 4),
    "a GAN's two in turn": ([0, 1, 0, 1, 0, 1], 3),
    "one for each parameter, in any order": ([0, 1, 2, 2, 0, 1, 1, 2, 0], 3),
    "one that steps seldom": ([0, 0, 0, 1, 0, 0], 5),
    "five of one for one of the other": ([0, 0, 0, 0, 0, 1] * 2, 10),
}


@pytest.mark.parametrize(("order", "steps"), ROUNDS.values(), ids=ROUNDS)
def test_a_step_is_a_round_of_optimizers(measured, tmp_path, order, steps):
    several = [optimizer() for _ in range(3)]
    for place in order:
        several[place].step()
    assert record(tmp_path).made == steps
    assert [step.number for step in record(tmp_path).recent] == list(range(1, steps + 1))


def test_waiting_is_taken_off_where_it_belongs(measured, tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(measured.clock, "moment", lambda: now[0])
    monkeypatch.setattr(
        measuring, "time", SimpleNamespace(**dict.fromkeys(("perf_counter", "time", "monotonic"), lambda: now[0]))
    )
    stepping = optimizer()

    def wait_for_others(seconds: float) -> None:
        def wait(_: object) -> None:
            now[0] += seconds

        measured.timed(measured.timed(wait))(None)  # one inside of another counts once

    def next_batch(_: object) -> torch.Tensor:
        now[0] += 1.0
        wait_for_others(4.0)
        measured.read(lambda _: torch.ones(7, 5), None)  # a loader that reads another
        return torch.ones(3, 5, dtype=torch.int64)

    stepping.step()
    measured.read(next_batch, None)
    measured.read(next_batch, None)
    now[0] += 10.0
    wait_for_others(2.0)
    stepping.step()
    first, second = record(tmp_path).recent
    assert isnan(first.seconds)
    assert (second.seconds, second.data_seconds, second.peer_seconds) == (22.0, 2.0, 10.0)
    assert (second.samples, second.tokens) == (6, 30)


def test_what_other_threads_wait_for_is_not_the_scripts(measured, tmp_path):
    thread = threading.Thread(target=measured.timed(threading.Event().wait), args=(0.01,))
    stepping = optimizer()
    stepping.step()
    thread.start()
    thread.join()
    stepping.step()
    assert record(tmp_path).recent[-1].peer_seconds == 0.0


BATCHES = {
    "a tensor": (torch.ones(4, 2), 4, None),
    "several": ([torch.ones(4, 2), torch.ones(4)], 4, None),
    "token ids by name": ({"labels": torch.ones(9), "input_ids": torch.ones(2, 6, dtype=torch.int64)}, 2, 12),
    "a mask": ((torch.ones(4, 2, dtype=torch.bool),), 4, None),
    "inside of inside": ({"x": [(torch.ones(4, 8, dtype=torch.int32),)]}, 4, 32),
    "no tensor": (["text", "more"], None, None),
    "nothing": (None, None, None),
}


@pytest.mark.parametrize(("batch", "samples", "tokens"), BATCHES.values(), ids=BATCHES)
def test_samples_and_tokens_are_counted_by_what_a_loader_gives(measured, tmp_path, batch, samples, tokens):
    stepping = optimizer()
    stepping.step()
    measured.read(lambda _: batch, None)
    with torch.no_grad():
        measured.read(lambda _: batch, None)  # an evaluation's
    stepping.step()
    step = record(tmp_path).recent[-1]
    assert (None if isnan(step.samples) else step.samples) == samples
    assert (None if isnan(step.tokens) else step.tokens) == tokens


def test_torchs_own_loaders_pass(measured, tmp_path, monkeypatch):
    owner, path = NEXT_BATCH
    monkeypatch.setattr(owner._BaseDataLoaderIter, "__next__", owner._BaseDataLoaderIter.__next__)
    wrap(owner, path, measured.read)
    stepping = optimizer()
    for workers in (0, 1):
        for _ in DataLoader(TensorDataset(torch.ones(12, 5)), batch_size=4, num_workers=workers):
            stepping.step()
    assert [step.samples for step in record(tmp_path).recent] == [4] * 6
    assert all(step.data_seconds > 0 for step in record(tmp_path).recent)


def test_a_step_that_the_loss_scale_leaves_out_and_a_norm_are_noted(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.amp.GradScaler, "step", torch.amp.GradScaler.step)
    wrap(torch.amp, "GradScaler.step", measured.scale)
    stepping, scaler = optimizer(), torch.amp.GradScaler("cpu")
    (param,) = stepping.param_groups[0]["params"]
    for gradient in (1.0, float("inf"), 2.0):
        scaler.scale(torch.ones(()))
        param.grad = torch.full((3,), gradient)
        measured.clip(torch.nn.utils.clip_grad_norm_, [param], 1.0)
        scaler.step(stepping)
        scaler.update()
    found = record(tmp_path).recent
    assert [step.skipped for step in found] == [0, 1, 0]
    assert [step.gradient_norm for step in found] == [
        pytest.approx(3**0.5), float("inf"), pytest.approx(12**0.5),
    ]  # fmt: skip


def test_a_rank_knows_no_norm_of_which_others_have_parts(measured, tmp_path):
    stepping = optimizer()
    norm = SimpleNamespace(placements=(SimpleNamespace(is_replicate=lambda: False),))
    assert measured.clip(lambda: norm) is norm
    stepping.step()
    assert isnan(record(tmp_path).recent[0].gradient_norm)


def test_an_exception_in_a_pass_ends_no_measuring(measured, tmp_path):
    def fail(_: object) -> None:
        raise ValueError

    stepping = optimizer()
    stepping.step()
    with suppress(ValueError):
        measured.timed(fail)(None)
    with suppress(ValueError):
        measured.read(fail, None)
    measured.read(lambda _: torch.ones(4, 2), None)
    stepping.step()
    assert record(tmp_path).recent[-1].samples == 4


def test_only_counting_writes_only_a_count(tmp_path):
    found = Measuring(StepWriter(tmp_path), only_counts=True)
    first, second = optimizer(), optimizer()
    for stepping in (first, second, first):
        found.note_step(stepping)
    assert record(tmp_path).made == 2
    assert list(record(tmp_path).recent) == []


class Stream:
    """A stream of a GPU that is some seconds behind its host."""

    def __init__(self) -> None:
        self.time, self.done = 0.0, 0.0
        self.capturing = False

    def wait_event(self, event: Any) -> None:
        self.time += event


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Puts a stand-in in the place of torch.cuda: nothing of it waits, and asking for what is not done fails."""
    stream = Stream()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, on: Stream) -> None:
            self.at = on.time

        def query(self) -> bool:
            return self.at <= stream.done

        def elapsed_time(self, after: Any) -> float:
            assert after.query(), "this would wait for the GPU, or fail"
            return 1000 * (after.at - self.at)

    cuda = SimpleNamespace(
        Event=Event,
        Stream=Stream,
        current_stream=lambda: stream,
        is_current_stream_capturing=lambda: stream.capturing,
        get_device_properties=lambda device: SimpleNamespace(total_memory=80 if device == "cuda:3" else 0),
        memory_allocated=lambda: 5,
        max_memory_allocated=lambda: 7,
    )
    monkeypatch.setattr(measuring.torch, "cuda", cuda)
    monkeypatch.setattr(Stream, "wait_event", Stream.wait_event)
    return stream


def on_gpu() -> Any:
    return SimpleNamespace(param_groups=[{"params": [SimpleNamespace(is_cuda=True, device="cuda:3")]}])


def test_a_gpu_is_asked_when_it_has_come_so_far(gpu, tmp_path):
    found, stepping = Measuring(StepWriter(tmp_path)), on_gpu()
    found.note_step(stepping)
    assert isinstance(found.clock, GpuClock)
    gpu.time += 3.0
    gpu.wait_event(2.0)  # as FSDP's groups do
    Stream().wait_event(9.0)  # another stream
    found.note_step(stepping)
    assert record(tmp_path).made == 2
    assert [step.number for step in record(tmp_path).recent] == [1]
    gpu.time += 1.0
    gpu.done = 5.5
    found.note_step(stepping)
    assert [step.number for step in record(tmp_path).recent] == [1, 2]
    step = record(tmp_path).recent[-1]
    assert (step.seconds, step.peer_seconds) == (5.0, 2.0)
    assert (step.memory_bytes, step.peak_bytes) == (5, 7)
    gpu.done = 6.0
    found.write()
    assert record(tmp_path).recent[-1].seconds == 1.0
    assert record(tmp_path).memory_limit == 80


def test_a_graph_that_is_captured_has_no_events_of_ours(gpu, tmp_path):
    found, stepping = Measuring(StepWriter(tmp_path)), on_gpu()
    gpu.done = 100.0
    found.note_step(stepping)
    gpu.capturing = True
    found.note_step(stepping)
    gpu.capturing, gpu.time = False, 4.0
    found.note_step(stepping)
    gpu.time = 7.0
    found.note_step(stepping)
    assert [step.seconds for step in record(tmp_path).recent if not isnan(step.seconds)] == [3.0]


def test_no_step_costs_more_memory_than_a_gpu_can_be_behind(gpu, tmp_path):
    found, stepping = Measuring(StepWriter(tmp_path)), on_gpu()
    found.note_step(stepping)
    for _ in range(600):
        gpu.time += random.Random(1).random()
        found.note_step(stepping)
    assert len(found._pending) == measuring._MOST_PENDING


def test_a_step_that_only_begins_an_optimizers_state_is_none(measured, tmp_path, monkeypatch):
    """Plain SGD has no state that would say that it has stepped: each save would count a step."""
    monkeypatch.setattr(state_dict, "_init_optim_state", state_dict._init_optim_state)
    wrap_once_imported(*STATE_BEGUN, measured.begin_state)
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        plain.step()
        plain.zero_grad()
        state_dict.get_optimizer_state_dict(model, plain)
    assert record(tmp_path).made == 3


def test_a_trainer_says_how_many_steps_there_will_be(measured, tmp_path):
    stepping = optimizer()
    stepping.step()
    state = SimpleNamespace(max_steps=50, global_step=10)
    assert measured.begin_training(lambda *given: given, "handler", "args", state, "control")[-1] == "control"
    stepping.step()
    assert record(tmp_path).total == 41
