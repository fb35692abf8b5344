"""Each rank's draws for its rows are its part of what one process draws for all, by any generator."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fsdplaunch.runtime.auto.data.local_batches import LocalBatches
from fsdplaunch.runtime.auto.rng.global_draws import drawing_for_global_batch

ROWS, RANKS = 4, 2


def context(rank: int) -> Any:
    return SimpleNamespace(
        keeps_batch=True,
        data=SimpleNamespace(rank=rank, size=RANKS),
        streams=SimpleNamespace(alike=False, seed_offset=0),
        ownership=SimpleNamespace(ours=True),
        batches=LocalBatches(sizes={ROWS}, current=ROWS),
        models=[torch.nn.Linear(1, 1)],
    )


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


DRAWS: dict[str, Callable[[int], Any]] = {
    "randn": lambda rows: torch.randn(rows, 3, generator=generator()),
    "rand": lambda rows: torch.rand((rows, 1), generator=generator()),
    "randint": lambda rows: torch.randint(0, 9, (rows, 3), generator=generator()),
    "normal_": lambda rows: torch.empty(rows, 3).normal_(generator=generator()),
    "bernoulli": lambda rows: torch.bernoulli(torch.full((rows, 3), 0.5), generator=generator()),
    "numpy normal": lambda rows: np.random.default_rng(3).normal(0, 2, (rows, 3)),
    "numpy integers": lambda rows: np.random.default_rng(3).integers(0, 9, size=rows),
    "numpy random": lambda rows: np.random.default_rng(3).random((rows, 3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_ranks_draw_what_one_process_draws(name: str) -> None:
    drawn = []
    for rank in range(RANKS):
        with drawing_for_global_batch(context(rank)):
            drawn.append(torch.as_tensor(DRAWS[name](ROWS)))
    assert torch.equal(torch.cat(drawn), torch.as_tensor(DRAWS[name](ROWS * RANKS)))


def test_draws_within_limits_of_this_ranks_rows_are_left_alone() -> None:
    limits = np.arange(ROWS)
    with drawing_for_global_batch(context(1)):
        assert np.random.default_rng(3).normal(limits, 1, ROWS).shape == (ROWS,)
