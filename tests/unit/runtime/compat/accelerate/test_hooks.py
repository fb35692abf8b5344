"""Hooks of accelerate's `save_state` take away the states that they were given, and none where there are none."""

from types import SimpleNamespace
from typing import Any

import pytest

from fsdplaunch.runtime.compat import accelerate


class _Accelerator:
    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def register_save_state_pre_hook(self, hook: Any) -> str:
        self.hooks.append(hook)
        return "handle"


@pytest.mark.parametrize(
    ("weights", "taken"),
    [([], [None, None]), ([{"a": 1}], [{"a": 1}]), ([{"a": 1}, {"b": 2}], [{"b": 2}, {"a": 1}])],
)
def test_a_hook_takes_what_is_there_and_none_where_shards_were_saved(weights: list[Any], taken: list[Any]) -> None:
    class Accelerator(_Accelerator):
        pass

    accelerate._register_save_hooks(SimpleNamespace(Accelerator=Accelerator))
    accelerator = Accelerator()
    found = []

    def hook(models: list[str], weights: list[Any], folder: str) -> None:
        assert (models, folder) == (["model"], "out")
        found.extend(weights.pop() for _ in taken)

    assert accelerator.register_save_state_pre_hook(hook) == "handle"
    accelerator.hooks[0](["model"], weights, "out")
    assert found == taken
    assert weights == []
