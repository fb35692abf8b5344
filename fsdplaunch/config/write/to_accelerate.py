"""What accelerate reads: the values its file must hold to mean the same, and keys of its files it ignores."""

from dataclasses import replace
from typing import Any

from fsdplaunch.config.load.key_names import key_prefix
from fsdplaunch.config.load.load import LoadedConfig
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.rules.base import fsdp, mesh, shown_value
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.walk import Path as KeyPath
from fsdplaunch.config.schema.walk import all_keys, own_sections, section_classes, value_at
from fsdplaunch.config.world_size import has_one_axis, mesh_sizes, world_size
from fsdplaunch.config.write.render import render_values, values_to_write
from fsdplaunch.config.write.to_fsdp2 import Conversion, KeyChange
from fsdplaunch.errors import UsageError
from fsdplaunch.terminal_text import one_line

_ALWAYS = {
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


def accelerate_values(config: Config) -> tuple[dict[KeyPath, Any], list[KeyChange]]:
    """Return the values of a file for accelerate, in the schema's order, and what it cannot say.

    Args:
        config: Resolved.

    Raises:
        UsageError: accelerate has no way to say it.
    """
    changes: list[KeyChange] = []
    values = {path: value for path, value in values_to_write(config).items() if path[0] not in own_sections()}
    values = {**_ALWAYS, **values, **_workers(config, changes), **_rendezvous(config)}
    values = _sharding(config, values, changes)
    return {spec.path: values[spec.path] for spec in all_keys() if values.get(spec.path) is not None}, changes


def _workers(config: Config, changes: list[KeyChange]) -> dict[KeyPath, Any]:
    world = world_size(config)
    if world is None:
        message = "auto; accelerate needs --num_processes on its command line"
        changes.append(KeyChange(key="num_processes", action="dropped", message=message))
    return {("num_processes",): world}


def _rendezvous(config: Config) -> dict[KeyPath, Any]:
    """Return the address of node 0, from whichever key names it."""
    endpoint = config.launch.rendezvous_endpoint
    host, _, port = endpoint.rpartition(":") if endpoint else ("", "", "")
    return {
        ("main_process_ip",): config.main_process_ip or host or None,
        ("main_process_port",): config.main_process_port or (int(port) if port else None),
    }


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
        changes.append(KeyChange(key="fsdp_config.fsdp_reshard_after_forward", action="changed", message=message))
        values[fsdp("reshard_after_forward")] = True
    if values.pop(fsdp("forward_prefetch"), None):
        message = "accelerate ignores it under FSDP2; blocks are gathered when they are needed"
        changes.append(KeyChange(key="fsdp_config.fsdp_forward_prefetch", action="dropped", message=message))
    if values.pop(fsdp("sync_module_states"), None) is not None:
        message = "accelerate's FSDP2 sends rank 0's weights only with fsdp_cpu_ram_efficient_loading"
        changes.append(KeyChange(key="fsdp_config.fsdp_sync_module_states", action="dropped", message=message))
    return values | _mesh(config)


def _mesh(config: Config) -> dict[KeyPath, Any]:
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

    Args:
        loaded: Any configuration.

    Raises:
        UsageError: accelerate has no way to say it.
    """
    values, changes = accelerate_values(loaded.config)
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
    """Name every key of a file that has no effect under `accelerate launch`, with the reason."""
    lines = [
        f"{written}: accelerate does not know this spelling of {canonical}"
        for written, canonical in loaded.aliases.items()
        if key_prefix("fsdp_config") + written.rpartition(".")[2] != canonical
    ]
    in_file = {path for path, origin in loaded.origins.items() if origin.layer == "file"}
    lines += [
        f"{name}: accelerate takes it from its command line only"
        for name in ("rdzv_backend", "same_network", "enable_cpu_affinity", "downcast_bf16")
        if (name,) in in_file
    ]
    version = loaded.config.fsdp_config.fsdp_version
    if version == 1 and fsdp("reshard_after_forward") in in_file:
        lines.append("fsdp_reshard_after_forward: accelerate runs FULL_SHARD whatever strategy is named here")
    if version != 1 and fsdp("sharding_strategy") in in_file:
        lines.append("fsdp_sharding_strategy: accelerate reads fsdp_reshard_after_forward only")
    if version != 1 and value_at(loaded.config, fsdp("forward_prefetch")):
        lines.append("fsdp_forward_prefetch: accelerate ignores it under FSDP2")
    return tuple(lines)
