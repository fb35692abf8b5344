"""What is called before the first step of any optimizer is called once, and leaves others' hooks alone."""

import torch
from torch.optim import optimizer as optimizers

from fsdplaunch.runtime.patch import before_first_step


def test_check_is_called_once_beside_the_hooks_of_others(monkeypatch):
    monkeypatch.setattr(optimizers, "_global_optimizer_pre_hooks", type(optimizers._global_optimizer_pre_hooks)())
    calls = []
    before_first_step(optimizers, lambda: calls.append("check"))
    optimizers.register_optimizer_step_pre_hook(lambda *_: calls.append("step"))
    for _ in range(2):
        param = torch.nn.Parameter(torch.ones(1))
        param.grad = torch.ones(1)
        torch.optim.SGD([param], lr=0.1).step()
    assert calls == ["check", "step", "step"]
