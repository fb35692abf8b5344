"""Modules are adapted when something imports them; the first step of any optimizer is looked at once."""

import sys

import pytest
import torch
from torch.optim import optimizer as optimizers

from fsdplaunch.runtime.patch import before_first_step, once_imported


def test_module_that_is_missing_stays_missing(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    once_imported("email.none", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"email\.none"):
        __import__("email.none")


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
