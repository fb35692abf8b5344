"""Modules inside of wrappers are shown at the places they had before, and put back."""

import pytest
import torch
from torch import nn

from fsdplaunch.runtime.inspection.units import without_wrappers
from fsdplaunch.runtime.torch_internals.modules import checkpoint_wrapper


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
