"""Files for another reader: one for FSDP1 as one for FSDP2, any as one that accelerate takes.

Every key that changes is named with what that means for a run; nothing is dropped silently.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fsdplaunch.config.load import LoadedConfig, stack
from fsdplaunch.config.names import key_prefix
from fsdplaunch.config.render import render_values, set_keys, values_to_write
from fsdplaunch.config.resolve import KEEPS_GATHERED, REST, has_one_axis, mesh_sizes, resolve, world_size
from fsdplaunch.config.rules.base import fsdp, mesh, shown_value
from fsdplaunch.config.rules.sharding import LEFT_OVER
from fsdplaunch.config.schema.config import (
    Config,
    KeyPath,
    all_keys,
    keys_by_path,
    own_sections,
    section_classes,
    value_at,
)
from fsdplaunch.config.yaml_text import read_text
from fsdplaunch.display_text import one_line
from fsdplaunch.errors import UsageError

Action = Literal["changed", "added", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """What happened to one key: what it became, and what that means for a run."""

    key: str
    action: Action
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The text of a converted file, and what happened to each key that is not simply kept."""

    text: str
    changes: tuple[KeyChange, ...]


def to_fsdp2(text: str, *, source: str = "the file") -> Conversion:
    """Return a file for FSDP2, comments and layout kept; one that is comes back without keys that only FSDP1 has.

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
            value = shown_value(value_at(loaded.config, path))
            steps.append((path, None, f"{value}; {what}" if of_version_1 else what))
    if of_version_1:
        steps += _steps(loaded)
    converted = set_keys(text, [(keys_by_path()[path], value) for path, value, _ in steps], source=source)
    stack(read_text(converted, source))  # raises where the result breaks a rule
    changes = []
    for path, value, message in steps:
        is_new = path != _VERSION and not _is_set(loaded, path)
        action: Action = "dropped" if value is None else "added" if is_new else "changed"
        changes.append(KeyChange(key=".".join(path), action=action, message=message))
    return Conversion(text=converted, changes=tuple(changes))


_Step = tuple[KeyPath, Any, str]
"""A key, its new value (None takes it out), and what that means for a run."""
_VERSION, _STRATEGY, _RESHARD = fsdp("version"), fsdp("sharding_strategy"), fsdp("reshard_after_forward")
_STATE_DICT, _REPLICAS, _SHARDS = fsdp("state_dict_type"), mesh("dp_replicate"), mesh("dp_shard")
_DROPPED: Mapping[KeyPath, str] = {
    **LEFT_OVER,
    fsdp("forward_prefetch"): "accelerate's FSDP2 does not have it, fsdplaunch's has: add it where it was faster",
    fsdp("sync_module_states"): "rank 0's values are sent to all ranks",
    ("precision", "buffer"): "FSDP2 leaves buffers in their own dtype",
}
"""Keys that only FSDP1 has, there or in accelerate, and what FSDP2 does whatever they say."""


def _is_set(loaded: LoadedConfig, path: KeyPath) -> bool:
    return loaded.origins[path].layer != "default"


def _steps(loaded: LoadedConfig) -> Iterator[_Step]:
    """Yield what changes in a file for FSDP1."""
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


_ALWAYS_WRITTEN = {
    ("compute_environment",): "LOCAL_MACHINE",
    ("machine_rank",): 0,
    ("num_machines",): 1,
    ("use_cpu",): False,
    ("debug",): False,
    fsdp("offload_params"): False,
    fsdp("activation_checkpointing"): False,
}
"""Keys its own files always say, with the values that mean nothing special."""

_LOST = {
    "launch": "accelerate takes it on its command line or not at all",
    "precision": "accelerate derives dtypes from mixed_precision",
    "checkpoint": "accelerate's scripts name the folder themselves",
}
_ELSEWHERE = {("launch", "workers_per_node"), ("launch", "rendezvous_endpoint")}
"""Keys of our own that other keys of an accelerate file can say."""


def _accelerate_values(config: Config) -> tuple[dict[KeyPath, Any], list[KeyChange]]:
    """Return the values of a file for accelerate, in the schema's order, and what it cannot say."""
    changes: list[KeyChange] = []
    host, _, port = (config.launch.rendezvous_endpoint or "").rpartition(":")
    values = {
        **_ALWAYS_WRITTEN,
        **{path: value for path, value in values_to_write(config).items() if path[0] not in own_sections()},
        ("num_processes",): world_size(config),
        ("main_process_ip",): config.main_process_ip or host or None,
        ("main_process_port",): config.main_process_port or (int(port) if port else None),
    }
    if world_size(config) is None:
        message = "auto; accelerate needs --num_processes on its command line"
        changes.append(KeyChange(key="num_processes", action="dropped", message=message))
    values = _sharding(config, values, changes)
    return {spec.path: values[spec.path] for spec in all_keys() if values.get(spec.path) is not None}, changes


_UNSAID: Mapping[KeyPath, str] = {
    fsdp("forward_prefetch"): "accelerate ignores it under FSDP2; blocks are gathered when they are needed",
    fsdp("sync_module_states"): "accelerate's FSDP2 sends rank 0's weights by fsdp_cpu_ram_efficient_loading only",
}
"""Keys that our FSDP2 has, and what accelerate's does without them."""


def _sharding(config: Config, values: dict[KeyPath, Any], changes: list[KeyChange]) -> dict[KeyPath, Any]:
    """Write fsdp_config and the mesh in the words its runtime reads."""
    values = {path: value for path, value in values.items() if path[0] != "parallelism_config"}
    if config.distributed_type != "FSDP":
        return {path: value for path, value in values.items() if path[0] != "fsdp_config"}
    if config.fsdp_config.fsdp_version == 1:
        if not has_one_axis(config):
            message = "accelerate's FSDP1 has no mesh; HYBRID_SHARD makes one replica per node"
            changes.append(KeyChange(key="parallelism_config", action="dropped", message=message))
        return values
    values.pop(fsdp("sharding_strategy"), None)
    reshard = config.fsdp_config.fsdp_reshard_after_forward
    if not isinstance(reshard, bool):
        message = f"true instead of groups of {reshard}; accelerate knows true and false only"
        changes.append(KeyChange(key=".".join(_RESHARD), action="changed", message=message))
        values[_RESHARD] = True
    for path, message in _UNSAID.items():
        if values.pop(path, None):
            changes.append(KeyChange(key=".".join(path), action="dropped", message=message))
    return values | _mesh_in_numbers(config)


def _mesh_in_numbers(config: Config) -> dict[KeyPath, Any]:
    """Return mesh sizes as numbers, where there is more than one dimension."""
    if has_one_axis(config):
        return {}
    world = world_size(config)
    if world is None:
        msg = "accelerate needs the number of workers to lay out a mesh"
        raise UsageError(msg, hint="set num_processes first")
    sizes = mesh_sizes(config, world)
    if sizes.shards * sizes.context == 1:
        msg = "accelerate has no FSDP2 without sharding"
        raise UsageError(msg, hint="set fsdp_version: 1 with NO_SHARD, or distributed_type: MULTI_GPU")
    found = {mesh("dp_replicate"): sizes.replicas, mesh("dp_shard"): sizes.shards}
    split = {mesh("cp"): sizes.context, mesh("tp"): sizes.tensor}
    return found | {path: size for path, size in split.items() if size > 1}


def to_accelerate(loaded: LoadedConfig) -> Conversion:
    """Return a file that `accelerate launch --config_file` takes and that means the same there.

    Raises:
        UsageError: accelerate has no way to say it.
    """
    values, changes = _accelerate_values(loaded.config)
    plain = resolve(replace(loaded.config, **{name: section_classes()[name]() for name in own_sections()}))
    lost = [
        KeyChange(key=spec.dotted, action="dropped", message=f"{shown_value(value)}; {_LOST[spec.path[0]]}")
        for spec in all_keys()
        if spec.path[0] in _LOST
        and spec.path not in _ELSEWHERE
        and (value := value_at(loaded.config, spec.path)) != value_at(plain, spec.path)
    ]
    head = f"# for accelerate; made by fsdplaunch from {one_line(str(loaded.path or 'its defaults'))}"
    return Conversion(text="\n".join([head, *render_values(values)]) + "\n", changes=(*changes, *lost))


def keys_ignored_by_accelerate(loaded: LoadedConfig) -> tuple[str, ...]:
    """Return the keys of a file that have no effect under `accelerate launch`, as the file spells them."""
    lost = [
        written
        for written, canonical in loaded.aliases.items()
        if key_prefix("fsdp_config") + written.rpartition(".")[2] != canonical
    ]
    ignored: list[KeyPath] = [
        (name,) for name in ("rdzv_backend", "same_network", "enable_cpu_affinity", "downcast_bf16")
    ]
    of_version_1 = loaded.config.fsdp_config.fsdp_version == 1
    ignored += [_RESHARD] if of_version_1 else [_STRATEGY, fsdp("forward_prefetch")]
    return (*lost, *(".".join(path) for path in ignored if loaded.origins[path].layer == "file"))
