"""What is recorded stays out of the way of what a script computes."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fsdplaunch.comparison.record import Recorder


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
