"""Modules are adapted when something imports them; the first step of any optimizer is looked at once."""

import sys

import pytest
import torch
from torch.optim import optimizer as optimizers

from fsdplaunch.runtime.patch import before_first_step, once_imported


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `guest` with a module `guest.inner` that nothing has imported."""
    (tmp_path / "guest").mkdir()
    (tmp_path / "guest" / "__init__.py").write_text("from guest.inner import value\n")
    (tmp_path / "guest" / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "guest"
    for name in ("guest", "guest.inner"):
        sys.modules.pop(name, None)


def change(module):
    module.value += 1


def test_module_imported_later_is_adapted_before_its_importer_sees_it(package):
    finders = list(sys.meta_path)
    once_imported("guest.inner", change)
    assert "guest" not in sys.modules
    assert __import__(package).value == 2
    assert sys.meta_path == finders


def test_module_imported_before_is_adapted_at_once(package):
    inner = __import__(f"{package}.inner", fromlist=["value"])
    once_imported("guest.inner", change)
    assert inner.value == 2


def test_module_that_is_missing_stays_missing(package):
    once_imported(f"{package}.none", change)
    with pytest.raises(ModuleNotFoundError, match=r"guest\.none"):
        __import__(f"{package}.none")


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
