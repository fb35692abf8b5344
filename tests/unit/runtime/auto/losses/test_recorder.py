"""Calls that are recorded can be made again with other tensors, and the recording leaves nothing behind."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import nn
from torch.overrides import _len_torch_function_stack

from fsdplaunch.runtime.auto.losses.first_batches.numbers import as_given
from fsdplaunch.runtime.auto.losses.first_batches.program import Program
from fsdplaunch.runtime.auto.losses.first_batches.recorder import LOOKS, Recorder

Loss = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.remove()
    assert not _len_torch_function_stack()


def filled(x: torch.Tensor) -> torch.Tensor:
    weights = torch.ones(len(x))
    weights[1:] = 0.5
    return (x.sum(1) * weights).sum()


def in_place(x: torch.Tensor) -> torch.Tensor:
    each = x * 1.0
    each.mul_(2).clamp_(min=0)
    return each.mean()


def read(x: torch.Tensor) -> torch.Tensor:
    return (x / x.max().item()).mean()


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        weights = x.softmax(1)
    return (weights * x).sum(1).mean()


def several(x: torch.Tensor) -> torch.Tensor:
    largest, places = x.max(1)
    return F.cross_entropy(x, places) + torch.stack([largest.mean(), x.mean()]).sum()


@pytest.mark.parametrize("loss", [filled, in_place, read, without_gradients, several])
def test_calls_are_made_again_with_other_tensors(recorder: Recorder, loss: Loss) -> None:
    first, other = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    recorder.begin()
    program = recorder.program_of(loss(first))
    recorder.end()
    assert program is not None
    (number,) = program.inputs
    expected = loss(first)
    torch.testing.assert_close(program.run({number: first.detach()}, as_given), expected.detach())
    computed = program.run({number: other}, lambda _call, value: value)  # what was read is read again
    torch.testing.assert_close(computed, loss(other))


def test_modules_with_parameters_and_random_numbers_are_given(recorder: Recorder) -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    recorder.begin()
    out = layer(x)
    noise = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    program = recorder.program_of((F.dropout(out, 0.5) + out + noise).mean())
    assert isinstance(program, Program)
    shapes = [recorder.inputs[number].tensor for number in program.inputs]
    assert [None if each is None else each.shape for each in shapes] == [(4, 2)] * 3


def test_recording_ends_some_passes_after_the_last_new_loss(recorder: Recorder) -> None:
    for number in range(3 + LOOKS):
        recorder.begin()
        assert not recorder.ended
        if number <= 2:
            recorder.note_new_loss()
        recorder.note_backward()
    assert recorder.ended
    recorder.begin()
    assert not _len_torch_function_stack()


def test_devices_that_are_set_around_it_go_as_they_came(recorder: Recorder) -> None:
    with torch.device("meta"):
        recorder.begin()
        assert torch.ones(2).is_meta
    assert not torch.ones(2).is_meta
    with torch.device("meta"):
        recorder.remove()
        assert torch.ones(2).is_meta
    assert not torch.ones(2).is_meta


def test_a_default_device_may_be_set_before_it_and_changed_after(recorder: Recorder) -> None:
    torch.set_default_device("meta")
    try:
        recorder.begin()
        assert torch.ones(2).is_meta
        torch.set_default_device("cpu")
        assert not torch.ones(2).is_meta
    finally:
        torch.set_default_device(None)
    recorder.remove()
