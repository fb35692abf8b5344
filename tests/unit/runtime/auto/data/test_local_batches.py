"""Which dimension of what a model gets, or of what is drawn for it, has the rows of a rank's share."""

import sys
from types import SimpleNamespace

import pytest
import torch

from fsdplaunch.runtime.auto.data.local_batches import LocalBatches
from fsdplaunch.runtime.auto.rng.size_code import is_fixed_call

WORDS = torch.zeros(5, 8, dtype=torch.long)
"""(times, rows)"""


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        (torch.zeros(8, 3, 32, 32), 8),
        (torch.zeros(64, 8, 32, 32), 0),  # images of eight channels, as many as there are rows
        (torch.zeros(100, 8), 0),  # features
        (torch.zeros(5, 8, 16), 8),
        (WORDS, 8),
        ([{"words": WORDS}], 8),
        (SimpleNamespace(images=torch.zeros(8, 3, 32, 32)), 8),
        ({"batch": SimpleNamespace(store=SimpleNamespace(words=[WORDS]))}, 8),
    ],
)
def test_rows_that_a_pass_gets(given: object, rows: int) -> None:
    batches = LocalBatches()
    batches.note(8)
    batches.enter([given])
    assert batches.current == rows


def test_passes_that_are_given_no_tensors_are_not_taken_for_the_same() -> None:
    batches = LocalBatches()
    found = []
    for given in (object(), SimpleNamespace(rows=torch.ones(3)), torch.zeros(3)):
        batches.enter([given])
        found.append(batches.fingerprint)
    assert found == [None, pytest.approx(1 + 2**0.5 + 3**0.5), 0.0]


def test_other_words_with_the_same_sum_are_not_taken_for_the_same() -> None:
    batches = LocalBatches()
    found = []
    for given in (torch.tensor([3, 1, 2]), torch.tensor([1, 3, 2]), torch.tensor([3, 1, 2])):
        batches.enter([given, given.to_sparse()])
        found.append(batches.fingerprint)
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((8, 8), 0),
        ((40, 8), 0),  # features of flattened positions
        ((10, 8, 16), 1),  # times first inside of the model
        ((16, 8, 8), 0),  # weights between positions, of two heads of each row
        ((2, 8, 8), 1),  # states of two layers
        ((2, 16), 0),  # as many as another loader's share
        ((2, 8, 16), 1),
        ((7, 3), None),
        ((7, 8), None),
    ],
)
def test_dimension_of_rows_where_the_rows_came_first(shape: tuple[int, ...], dim: int | None) -> None:
    batches = LocalBatches()
    batches.note(2)
    batches.note(8)
    batches.enter([torch.zeros(8, 5, 8)])
    assert batches.dim_of_rows(shape) == dim


@pytest.mark.parametrize(("shape", "dim"), [((8, 8, 16), 1), ((5, 8), 1), ((16, 5, 5), 0), ((8, 5), 0)])
def test_dimension_of_rows_where_the_time_came_first(shape: tuple[int, ...], dim: int) -> None:
    batches = LocalBatches()
    batches.note(8)
    batches.enter([WORDS])
    batches.enter([torch.zeros(8, 8, 16)])  # as many times
    assert batches.current == 8
    assert batches.dim_of_rows(shape) == dim


def test_sizes_that_are_written_as_numbers() -> None:
    def drawn(*_: object, **__: object) -> bool:
        return is_fixed_call(sys._getframe(1))

    class Tensor:
        uniform_ = drawn

    def empty(*_: object) -> Tensor:
        return Tensor()

    rand = randint = normal = drawn
    count = 1
    numbers = [rand(1), rand(1, 3, device="cpu"), rand((1, 2)), randint(0, count, (1,)), empty(1).uniform_()]
    numbers += [normal(0.0, count, size=(1,))]
    others = [rand(count), rand((count, 2)), randint(0, 10, (count,)), normal(0.0, 1.0, size=count), rand()]
    others += [empty(count).uniform_()]
    assert numbers == [True] * 6
    assert others == [False] * 6
