"""What libraries do with a model that is sharded for the script: the way of one process, or a clear error."""

import copy

import pytest
import torch
from torch import nn

from fsdplaunch.errors import ShardingError


class CallsForward(nn.Module):
    """As gpytorch's Module: a `__call__` of its own that calls forward and no hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(2 * x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.usefixtures("hooked")
def test_a_model_that_calls_forward_in_a_call_of_its_own_trains() -> None:
    model = CallsForward()
    alone = copy.deepcopy(model.linear)
    trained = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 4)

    model(x).square().mean().backward()
    optimizer.step()
    alone(2 * x).square().mean().backward()

    trained.step()

    assert torch.allclose(model(x), alone(2 * x))


class PartlyScripted(nn.Module):
    """As e3nn's models: of modules in Python and of compiled ones."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(4, 4), torch.jit.script(part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.linear(x))


@pytest.mark.usefixtures("hooked")
def test_parameters_of_scripted_modules_are_refused() -> None:
    model = PartlyScripted(nn.Linear(4, 4))

    with pytest.raises(ShardingError, match=r"test_libraries.py:\d+ .*: part is compiled by torch.jit.script"):
        torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.usefixtures("hooked")
def test_scripted_modules_without_parameters_train() -> None:
    model = PartlyScripted(nn.ReLU())
    alone = copy.deepcopy(model.linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 4)

    model(x).sum().backward()
    optimizer.step()
    torch.relu(alone(x)).sum().backward()

    assert torch.allclose(model.linear.weight.full_tensor(), alone.weight - 0.1 * alone.weight.grad)
