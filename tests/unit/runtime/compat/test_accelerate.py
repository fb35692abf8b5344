"""What accelerate's scripts get: no cache under activation checkpointing."""

from types import SimpleNamespace

import pytest
from torch import nn

from fsdplaunch.runtime.compat.accelerate import _prepare


@pytest.mark.parametrize("recomputes", [None, False, True])
def test_the_cache_of_a_model_inside_another_is_turned_off_where_blocks_are_computed_twice(
    capsys: pytest.CaptureFixture[str], recomputes: bool | None
) -> None:
    inner = nn.Linear(1, 1)
    inner.config = config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    model = nn.Sequential(inner)
    plugin = None if recomputes is None else SimpleNamespace(activation_checkpointing=recomputes)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    assert _prepare(lambda _, *objects: objects, accelerator, model, "scheduler") == (model, "scheduler")
    assert config.use_cache is not bool(recomputes)
    assert ("set the model's use_cache to false" in capsys.readouterr().err) is bool(recomputes)
