"""What is recorded stays out of the way of what a script computes, under the same names in each process."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fsdplaunch.comparison.record import LastDigits, NamedModels, Recorder


def test_gradients_of_single_rows_by_torch_func_are_not_in_the_way():
    model, recorder = nn.Linear(3, 1), Recorder()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(recorder._forward)
    try:
        params = dict(model.named_parameters())
        rows = vmap(grad(lambda p, x: functional_call(model, p, (x,)).sum()), in_dims=(None, 0))
        found = rows(params, torch.ones(4, 3))
        assert recorder._now.rows is None
        model(torch.ones(5, 3))
    finally:
        hook.remove()
    assert found["weight"].shape == (4, 1, 3)
    assert recorder._now.rows == 5


def test_passes_and_losses_without_values_are_no_steps():
    recorder, model = Recorder(), nn.Linear(3, 1, device="meta")
    out = model(torch.ones(5, 3, device="meta"))
    recorder._forward(model, (torch.ones(5, 3, device="meta"),))
    assert not recorder._loss(out.sum())
    assert (recorder._now.rows, recorder._now.losses) == (None, [])


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


def test_models_of_one_size_are_named_in_the_order_in_which_they_are_trained():
    for reverse in (False, True):
        made = [nn.Sequential(nn.Linear(3, 3)) for _ in range(3)]
        trained = made[::-1] if reverse else made
        params = [param for model in trained for param in model.parameters()]
        names = {id(param): name for name, param, _ in NamedModels().named(params)}
        found = [names[id(model[0].weight)] for model in trained]
        assert found == ["0.weight", "Sequential2.0.weight", "Sequential3.0.weight"]
