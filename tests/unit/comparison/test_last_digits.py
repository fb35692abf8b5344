"""Weights are changed in their last digits, once, and nothing else is."""

import torch
from torch import nn

from fsdplaunch.comparison.record import LastDigits


def test_each_parameter_is_changed_once_by_the_rounding_of_its_dtype():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double(), nn.Embedding(4, 8))
    model[2].weight = nn.Parameter(torch.zeros(4, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    digits = LastDigits()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(digits.before_forward)
    try:
        for _ in range(2):
            model[1](model[0](torch.ones(2, 8)).double())
            model[2](torch.tensor([1]))
    finally:
        hook.remove()
    for name, value in model.state_dict().items():
        far = ((value - before[name]) / before[name].where(before[name] != 0, torch.ones(()))).abs()
        epsilon = torch.finfo(value.dtype).eps
        assert far.max() <= 2 * epsilon, name
        assert (far > 0).all() or name == "2.weight", name
    assert len(digits.changed) == 5
    assert torch.equal(torch.get_rng_state(), state)  # the script's own draws stay what they are


def test_lazy_parameters_wait_until_they_have_values():
    lazy = nn.LazyLinear(3)
    digits = LastDigits()
    digits.before_forward(lazy, ())
    assert not digits.changed
    lazy(torch.ones(1, 2))
    digits.before_forward(lazy, ())
    assert len(digits.changed) == 2
