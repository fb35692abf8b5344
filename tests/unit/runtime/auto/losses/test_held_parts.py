"""Which tensors of a script are parts of its loss."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import torch

from fsdplaunch.runtime.auto.losses.graph import read_graph
from fsdplaunch.runtime.auto.losses.held_parts import Part, held_parts

ROWS = 4


class _Lazy:
    """An object whose attributes must not be asked for."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class _Slots:
    __slots__ = ("loss",)


def _outputs() -> torch.Tensor:
    return torch.nn.Linear(3, 5)(torch.randn(ROWS, 3))


def _parts(loss: torch.Tensor) -> list[Part]:
    return held_parts(loss, read_graph(loss.grad_fn, {ROWS}, 2).nodes)


def _values(loss: torch.Tensor) -> list[torch.Tensor]:
    return [part.value for part in _parts(loss)]


def test_variables_entries_and_attributes_are_found_in_the_order_of_the_graph() -> None:
    out = _outputs()
    mean, entries = out.mean(), [out.pow(2).sum()]
    field = SimpleNamespace(loss=out.abs().mean(0).sum())
    others = [out.exp().mean(), out.sum(1), mean.detach(), _Lazy(), _Slots(), {1: _Lazy()}]
    loss = (mean + entries[0] + field.loss) / 2
    found = _values(loss)
    assert {id(each) for each in found} == {id(mean), id(entries[0]), id(field.loss)}
    assert [part.place for part in _parts(loss)] == sorted(part.place for part in _parts(loss))
    assert not {id(each) for each in others} & {id(each) for each in found}


def test_a_loss_that_is_held_twice_is_one_part() -> None:
    loss = _outputs().mean()
    same = loss
    half = loss / 2
    assert [id(each) for each in _values(half)] == [id(same)]


def test_what_a_function_lets_go_of_is_freed() -> None:
    out = _outputs()
    loss = out.mean()
    alive = weakref.ref(out)
    assert _values(loss / 2)
    del out, loss
    gc.collect()
    assert alive() is None
