"""A loader's worker process tells that its dataset draws, by any generator, and runs the script's function."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from fsdplaunch.runtime.auto.rng.worker_draws import WorkerDraws


class Items(Dataset[torch.Tensor]):
    """Four items that draw something."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> torch.Tensor:
        self.draw()
        return torch.full((2,), float(number))


@pytest.mark.parametrize(
    ("draw", "seen"),
    [(random.random, True), (np.random.rand, True), (lambda: torch.rand(1), True), (lambda: None, False)],
    ids=["random", "numpy", "torch", "nothing"],
)
def test_draws_in_a_worker_process_are_seen_outside(draw: Callable[[], Any], seen: bool, tmp_path: Path) -> None:
    draws = WorkerDraws(lambda worker: (tmp_path / f"worker-{worker}").touch(), default_collate)
    loader = DataLoader(Items(draw), batch_size=2, num_workers=1, worker_init_fn=draws)
    assert [batch[:, 0].tolist() for batch in loader] == [[0.0, 1.0], [2.0, 3.0]]
    assert draws.seen() is seen
    assert (tmp_path / "worker-0").exists()
