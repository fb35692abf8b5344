"""What of a dataset is compared over ranks: its values, and nothing that differs by process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fsdplaunch.runtime.auto.data.same_data import _fingerprint


def rows(change: int) -> torch.Tensor:
    return torch.arange(60.0).reshape(20, 3) + change


class Files:
    def __init__(self, change: int) -> None:
        self.files, self.handle = [(f"{number + change}.png", number) for number in range(9)], object()


@pytest.mark.parametrize(
    "made",
    [
        rows,
        lambda change: rows(change).numpy(),
        lambda change: TensorDataset(rows(change)),
        lambda change: ConcatDataset([TensorDataset(rows(0)), TensorDataset(rows(change))]),
        lambda change: Subset(TensorDataset(rows(0)), list(range(change, 9 + change))),
        lambda change: Subset(TensorDataset(rows(0)), range(change, 9 + change)),
        lambda change: [{"x": rows(change), "of": object()}],
        lambda change: np.array([f"{change}", object()], dtype=object),
        lambda change: np.array([f"{change}", "b"]),
        Files,
    ],
)
def test_other_values_are_other_data(made: Callable[[int], Any]) -> None:
    assert _fingerprint(made(0)) == _fingerprint(made(0)) != _fingerprint(made(1))
