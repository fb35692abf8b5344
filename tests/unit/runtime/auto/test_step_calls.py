"""A step of a plain script costs few calls of this package, whatever else runs on the machine that counts them."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsdplaunch
from tests.needs import needs

PACKAGE = str(Path(fsdplaunch.__file__).parent)
BLOCKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model.train()
    model(x).square().mean().backward()
    optimizer.step()
    model.zero_grad()


@needs("torch", "2.11", "dispatches each operator on shards in Python, through this package")
@pytest.mark.parametrize("wrap", [lambda model: model, DistributedDataParallel])
def test_calls_of_a_step_are_few(hooked: None, wrap: Any) -> None:
    model = wrap(Model())
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 8)
    for _ in range(3):
        step(model, optimizer, x)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    step(model, optimizer, x)
    sys.setprofile(None)
    params = len(list(model.parameters()))
    modules = len(list(model.modules()))
    assert calls["_place_gradients"] == 1  # the optimizer's step was seen
    assert not calls["_computed"]  # nothing is computed with shards but on local ones
    del calls["__torch_function__"]  # attributes are read
    assert calls.total() <= 100 + 8 * BLOCKS + 2 * modules + 3 * params, calls
