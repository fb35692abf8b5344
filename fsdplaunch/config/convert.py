"""A file for FSDP1 as one for FSDP2. Every key that changes is named with what that means for a run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fsdplaunch.config.load import LoadedConfig, stack
from fsdplaunch.config.render import set_keys
from fsdplaunch.config.resolve import KEEPS_GATHERED, REST
from fsdplaunch.config.rules.base import fsdp, mesh
from fsdplaunch.config.rules.sharding import LEFT_OVER
from fsdplaunch.config.schema.config import KeyPath, keys_by_path, value_at
from fsdplaunch.config.schema.kinds import write
from fsdplaunch.config.yaml_text import read_text
from fsdplaunch.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """What happened to one key: what it became, and what that means for a run."""

    key: str
    action: Literal["changed", "added", "dropped"]
    message: str


def to_fsdp2(text: str, *, source: str = "the file") -> tuple[str, list[KeyChange]]:
    """Return a file for FSDP2, comments and layout kept, and what happened to each key that is not simply kept.

    One that is for FSDP2 comes back without keys that only FSDP1 has.

    Raises:
        ConfigError: The file is wrong to begin with.
        UsageError: The file shards nothing, or a value is shared through an anchor.
    """
    loaded = stack(read_text(text, source))
    if loaded.config.distributed_type != "FSDP":
        msg = f"{source} shards nothing: its distributed_type is {loaded.config.distributed_type}"
        raise UsageError(msg, hint="set distributed_type: FSDP first")
    of_version_1 = loaded.config.fsdp_config.fsdp_version == 1
    steps: list[_Step] = []
    for path, what in _DROPPED.items():
        if _is_set(loaded, path) and (of_version_1 or keys_by_path()[path].key.versions == (1,)):
            value = write(value_at(loaded.config, path))
            steps.append((path, None, f"{value}; {what}" if of_version_1 else what))
    if of_version_1:
        steps += _steps(loaded)
    converted = set_keys(text, [(keys_by_path()[path], value) for path, value, _ in steps], source=source)
    stack(read_text(converted, source))  # raises where the result breaks a rule
    changes = []
    for path, value, message in steps:
        is_new = path != _VERSION and not _is_set(loaded, path)
        action: Any = "dropped" if value is None else "added" if is_new else "changed"
        changes.append(KeyChange(key=".".join(path), action=action, message=message))
    return converted, changes


_Step = tuple[KeyPath, Any, str]  # a key, its new value (None takes it out), and what that means for a run
_VERSION, _STRATEGY, _RESHARD = fsdp("version"), fsdp("sharding_strategy"), fsdp("reshard_after_forward")
_STATE_DICT, _REPLICAS, _SHARDS = fsdp("state_dict_type"), mesh("dp_replicate"), mesh("dp_shard")
_DROPPED: Mapping[KeyPath, str] = {
    **LEFT_OVER,
    fsdp("forward_prefetch"): "accelerate's FSDP2 does not have it, fsdplaunch's does: set it if it was faster",
    fsdp("sync_module_states"): "rank 0's values are sent to all ranks",
    ("precision", "buffer"): "FSDP2 leaves buffers in their own dtype",
}
"""Keys that only FSDP1 has, there or in accelerate, and what FSDP2 does whatever they say."""


def _is_set(loaded: LoadedConfig, path: KeyPath) -> bool:
    return loaded.origins[path].layer != "default"


def _steps(loaded: LoadedConfig) -> Iterator[_Step]:
    yield _VERSION, 2, "2"
    strategy = loaded.config.fsdp_config.fsdp_sharding_strategy or "FULL_SHARD"
    keeps, nodes = strategy in KEEPS_GATHERED, loaded.config.num_machines
    if _is_set(loaded, _STRATEGY):
        yield _STRATEGY, None, f"{strategy} is set by fsdp_reshard_after_forward and the mesh"
    meaning = "false: parameters stay gathered until backward" if keeps else "true"
    yield _RESHARD, not keeps, f"{meaning} ({strategy})"
    has_mesh = _is_set(loaded, _REPLICAS) or _is_set(loaded, _SHARDS)
    if strategy == "NO_SHARD":
        yield _REPLICAS, REST, "-1: every worker holds a replica (NO_SHARD)"
        yield _SHARDS, 1, "1: nothing is sharded (NO_SHARD)"
    elif strategy.startswith("HYBRID") and not has_mesh and nodes > 1:
        yield _REPLICAS, nodes, f"{nodes}: one replica per node ({strategy})"
    if loaded.config.fsdp_config.fsdp_state_dict_type == "LOCAL_STATE_DICT":
        message = "SHARDED_STATE_DICT; FSDP2 has no local flat shards, old checkpoints must be merged first"
        yield _STATE_DICT, "SHARDED_STATE_DICT", message
    elif not _is_set(loaded, _STATE_DICT):
        message = "FULL_STATE_DICT, which FSDP1 had by default; SHARDED_STATE_DICT is FSDP2's"
        yield _STATE_DICT, "FULL_STATE_DICT", message
