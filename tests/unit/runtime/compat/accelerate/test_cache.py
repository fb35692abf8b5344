"""Models that accelerate gives activation checkpointing keep no cache of keys and values."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fsdplaunch.runtime.compat import accelerate


def _model() -> tuple[nn.Module, Any]:
    inner = nn.Linear(1, 1)
    inner.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    return nn.Sequential(inner), inner.config


@pytest.mark.parametrize("plugin", [None, SimpleNamespace(activation_checkpointing=False)])
def test_the_cache_stays_where_nothing_is_computed_twice(plugin: Any) -> None:
    model, config = _model()
    assert _prepare(plugin, model, "scheduler") == (model, "scheduler")
    assert config.use_cache is True


def test_the_cache_of_a_model_inside_another_is_turned_off(capsys: pytest.CaptureFixture[str]) -> None:
    model, config = _model()
    assert _prepare(SimpleNamespace(activation_checkpointing=True), model, "scheduler") == (model, "scheduler")
    assert config.use_cache is False
    assert "set the model's use_cache to false" in capsys.readouterr().err


def _prepare(plugin: Any, *objects: Any) -> Any:
    class Accelerator:
        state = SimpleNamespace(fsdp_plugin=plugin)

        def prepare(self, *objects: Any) -> Any:
            return objects

    accelerate._prepare_without_cache(SimpleNamespace(Accelerator=Accelerator))
    return Accelerator().prepare(*objects)
