"""Who shards is said once, and as it is: a library that replicates shards only where it was told to."""

import pytest

from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.walk import build_config
from fsdplaunch.runtime.auto.detect import ownership
from fsdplaunch.runtime.library_watch import Library


def test_a_library_that_replicates_is_said_to_shard_only_where_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    sharded: list[str] = []
    library = Library(name="Trainer", remedy="", replicates=True)
    monkeypatch.setattr(ownership.messages, "say", said.append)
    monkeypatch.setattr(ownership, "on_sharding", lambda _: None)
    monkeypatch.setattr(ownership, "built_library", lambda: library)
    monkeypatch.setattr(ownership, "sharded_by", lambda: next(iter(sharded), None))
    config = resolve(build_config({("fsdp_config", "fsdp_version"): 2}))
    replicating = ownership.Ownership(config)
    assert not replicating.claim("builds AdamW")
    assert replicating.claim_replicas("gives it to DistributedDataParallel")
    assert said == ["launch.shard auto: Trainer replicates, so its model is sharded"]
    sharded.append("FullyShardedDataParallel")
    assert not ownership.Ownership(config).claim("builds AdamW")
    assert said[1].startswith("launch.shard auto: the script shards by itself (Trainer, ")
