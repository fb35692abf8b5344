"""Libraries that shard by themselves count when their object is built, and bring the remedy that fits them."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from fsdplaunch.runtime import sharding_watch


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """A Lightning that does nothing."""
    module = ModuleType("lightning.pytorch.trainer.trainer")
    module.Trainer = type("Trainer", (), {"__init__": lambda self, strategy="ddp": None})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sharding_watch, "_built", [])
    monkeypatch.setattr(sharding_watch, "_listeners", [])
    finders = list(sys.meta_path)
    sharding_watch.watch_libraries()
    yield module.Trainer
    sys.meta_path[:] = finders


def test_library_counts_when_it_is_built_and_not_when_it_is_imported(trainer: type) -> None:
    told: list[bool] = []
    sharding_watch.on_sharding(lambda: told.append(True))
    assert sharding_watch.built_library() is None
    trainer(strategy="ddp")
    library = sharding_watch.built_library()
    assert library is not None
    assert library.replicates
    assert "FSDPStrategy" in library.remedy
    assert told == [True]
