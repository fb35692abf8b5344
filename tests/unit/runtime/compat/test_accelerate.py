"""What accelerate's scripts get: no cache under activation checkpointing, and save hooks that may take states."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fsdplaunch.runtime.compat import accelerate
from fsdplaunch.runtime.patch import wrap


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

    wrap(Accelerator, "prepare", accelerate._prepare)
    return Accelerator().prepare(*objects)


class _Accelerator:
    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def register_save_state_pre_hook(self, hook: Any) -> str:
        self.hooks.append(hook)
        return "handle"


@pytest.mark.parametrize(
    ("weights", "taken"),
    [([], [None, None]), ([{"a": 1}, {"b": 2}], [{"b": 2}, {"a": 1}])],
)
def test_a_hook_takes_what_is_there_and_none_where_shards_were_saved(weights: list[Any], taken: list[Any]) -> None:
    class Accelerator(_Accelerator):
        pass

    wrap(Accelerator, "register_save_state_pre_hook", accelerate._register_save_hook)
    accelerator = Accelerator()
    found = []

    def hook(models: list[str], weights: list[Any], folder: str) -> None:
        assert (models, folder) == (["model"], "out")
        found.extend(weights.pop() for _ in taken)

    assert accelerator.register_save_state_pre_hook(hook) == "handle"
    accelerator.hooks[0](["model"], weights, "out")
    assert found == taken
    assert weights == []
