"""Lightning takes its FSDP strategies on a CPU, and still refuses what else it refuses."""

import sys
from types import ModuleType

import pytest

from fsdplaunch.runtime import compat


class Connector:
    """What chooses Lightning's parts, of the same shape."""

    def __init__(self, strategy: str) -> None:
        self._strategy_flag, self._accelerator_flag = strategy, "cpu"

    def _check_strategy_and_fallback(self) -> None:
        if self._strategy_flag == "fsdp" and self._accelerator_flag not in ("cuda", "gpu"):
            raise ValueError("The strategy `fsdp` requires a GPU accelerator")
        if self._strategy_flag == "ddp_fork":
            raise ValueError("process forking is not supported")


@pytest.mark.parametrize("module_name", ["lightning.fabric.connector", "lightning_fabric.connector"])
def test_fsdp_is_taken_on_a_cpu(monkeypatch: pytest.MonkeyPatch, module_name: str) -> None:
    module = ModuleType(module_name)
    module._Connector = type("_Connector", (Connector,), dict(vars(Connector)))
    monkeypatch.setitem(sys.modules, module_name, module)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    connector = module._Connector("fsdp")
    with pytest.raises(ValueError, match="requires a GPU"):
        connector._check_strategy_and_fallback()
    compat.adapt_lightning_to_cpu()
    connector._check_strategy_and_fallback()
    assert connector._accelerator_flag == "cpu"
    with pytest.raises(ValueError, match="forking"):
        module._Connector("ddp_fork")._check_strategy_and_fallback()
