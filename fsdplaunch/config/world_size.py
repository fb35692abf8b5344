"""How many workers a configuration means, as far as the file alone can tell."""

from dataclasses import replace

from fsdplaunch.config.resolve import REST
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import UsageError

CPU_WORKERS = 2
"""Workers for `auto` on a node without GPUs: the fewest between which something is sharded."""


def node_range(config: Config) -> tuple[int, int]:
    """Return the fewest and the most nodes a run may have."""
    if config.launch.nodes is None:
        return config.num_machines, config.num_machines
    least, _, most = config.launch.nodes.partition(":")
    return int(least), int(most or least)


def workers_per_node(config: Config) -> int | None:
    """Return workers on each node, or None when that depends on the node's GPUs."""
    configured = config.launch.workers_per_node
    if isinstance(configured, int):
        return configured
    if (
        configured is None
        and isinstance(config.num_processes, int)
        and config.num_processes % config.num_machines == 0
    ):
        return config.num_processes // config.num_machines
    return None


def world_size(config: Config) -> int | None:
    """Return workers over all nodes, or None when that depends on the nodes' GPUs."""
    if isinstance(config.num_processes, int):
        return config.num_processes
    configured = config.launch.workers_per_node
    return configured * config.num_machines if isinstance(configured, int) else None


def split_world(world: int, replicas: int, shards: int) -> tuple[int, int]:
    """Return (replicas, ranks per replica), -1 replaced by what the other leaves; without both, all ranks shard.

    They fit when their product is `world`.
    """
    if replicas == REST:
        return (1, world) if shards == REST else (world // max(shards, 1), shards)
    return (replicas, world // max(replicas, 1)) if shards == REST else (replicas, shards)


def mesh_sizes(config: Config, world: int) -> tuple[int, int]:
    """Return (replicas, ranks per replica) for a number of workers; their product is `world`.

    Args:
        config: Resolved.
        world: Number of workers over all nodes.

    Raises:
        UsageError: The sizes do not fit.
    """
    sizes = config.parallelism_config
    replicas, shards = (
        sizes.parallelism_config_dp_replicate_size or 1,
        sizes.parallelism_config_dp_shard_size or REST,
    )
    found = split_world(world, replicas, shards)
    if found[0] * found[1] != world or min(found) < 1:
        msg = f"a mesh of {replicas} x {shards} does not fit {world} workers"
        raise UsageError(msg, hint="the sizes must multiply to the number of workers; -1 takes the rest")
    return found


def with_mesh(config: Config, world: int) -> Config:
    """Return the Config with both mesh sizes as numbers, which is what other libraries read from the environment.

    A mesh of one dimension stays unset.

    Raises:
        UsageError: The sizes do not fit the number of workers.
    """
    mesh = config.parallelism_config
    if mesh.parallelism_config_dp_replicate_size == 1 and mesh.parallelism_config_dp_shard_size is None:
        return config
    replicas, shards = mesh_sizes(config, world)
    return replace(
        config,
        parallelism_config=replace(
            mesh, parallelism_config_dp_replicate_size=replicas, parallelism_config_dp_shard_size=shards
        ),
    )
