"""Parameters have the names that the user wrote, and modules the places, whatever stands around them."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fsdplaunch.runtime.inspection import named_parameters
from fsdplaunch.runtime.inspection.units import without_wrappers
from fsdplaunch.runtime.torch_internals.modules import checkpoint_wrapper


class Short(nn.Module):
    """Leaves out one parameter, by a method that takes fewer arguments than torch's, as torchrl's losses."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.target = nn.Linear(2, 2), nn.Linear(2, 2)
        self.tied = self.own

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        named = super().named_parameters(prefix=prefix, recurse=recurse)
        yield from ((name, param) for name, param in named if not name.startswith("target"))


def test_a_method_with_fewer_arguments_is_asked_for_what_it_can_tell() -> None:
    assert [name for name, _ in named_parameters(Short())] == ["own.weight", "own.bias"]
    assert "tied.weight" in dict(named_parameters(Short(), remove_duplicate=False))


def test_places_are_those_before_anything_was_wrapped_and_come_back() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    before = {name: id(module) for name, module in model.named_modules()}
    model[0][0] = checkpoint_wrapper(model[0][0])
    model[0] = torch.compile(checkpoint_wrapper(model[0]), backend="eager")
    wrapped = {name: id(module) for name, module in model.named_modules()}
    assert wrapped != before
    with pytest.raises(OSError, match="full"), without_wrappers(model):  # also where what is done there fails
        assert {name: id(module) for name, module in model.named_modules()} == before
        raise OSError("full")
    assert {name: id(module) for name, module in model.named_modules()} == wrapped
