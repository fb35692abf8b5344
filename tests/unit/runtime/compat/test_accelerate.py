"""What accelerate's scripts get: no cache under activation checkpointing, and save hooks that may take states."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fsdplaunch.runtime.compat import accelerate
from fsdplaunch.runtime.patch import wrap


@pytest.fixture
def accelerator() -> Any:
    """An accelerator that does nothing, adapted as accelerate's is."""

    class Accelerator:
        def prepare(self, *objects: Any) -> Any:
            return objects

        def register_save_state_pre_hook(self, hook: Any) -> Any:
            return hook

    wrap(Accelerator, "prepare", accelerate._prepare)
    wrap(Accelerator, "register_save_state_pre_hook", accelerate._register_save_hook)
    return Accelerator()


@pytest.mark.parametrize("recomputes", [None, False, True])
def test_the_cache_of_a_model_inside_another_is_turned_off_where_blocks_are_computed_twice(
    capsys: pytest.CaptureFixture[str], accelerator: Any, recomputes: bool | None
) -> None:
    inner = nn.Linear(1, 1)
    inner.config = config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    model = nn.Sequential(inner)
    plugin = None if recomputes is None else SimpleNamespace(activation_checkpointing=recomputes)
    accelerator.state = SimpleNamespace(fsdp_plugin=plugin)
    assert accelerator.prepare(model, "scheduler") == (model, "scheduler")
    assert config.use_cache is not bool(recomputes)
    assert ("set the model's use_cache to false" in capsys.readouterr().err) is bool(recomputes)


@pytest.mark.parametrize(("weights", "taken"), [([], [None, None]), ([{"a": 1}, {"b": 2}], [{"b": 2}, {"a": 1}])])
def test_a_hook_takes_what_is_there_and_none_where_shards_were_saved(
    accelerator: Any, weights: list[Any], taken: list[Any]
) -> None:
    hook = accelerator.register_save_state_pre_hook(lambda _models, given, _folder: [given.pop() for _ in taken])
    assert hook(["one", "other"], weights, "out") == taken
    assert weights == []
