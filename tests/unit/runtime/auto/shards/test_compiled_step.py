"""A script may compile the step of an optimizer that trains shards: `torch.compile(optimizer.step)`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def trained(compiled: Callable[[Any], Any]) -> list[Any]:
    """Return the parameters after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    step, rows = compiled(optimizer.step), torch.linspace(-1, 1, 12).view(3, 4)
    for _ in range(3):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        step()
    return list(model.parameters())


def test_a_compiled_step_computes_the_same(hooked: None) -> None:
    eager = trained(lambda step: step)
    compiled = trained(lambda step: torch.compile(step, backend="eager"))
    assert all(isinstance(param, DTensor) for param in compiled)
    for one, other in zip(eager, compiled, strict=True):  # the compiler counts steps in fp32
        torch.testing.assert_close(one.to_local(), other.to_local(), rtol=0, atol=1e-5)
