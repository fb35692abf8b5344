"""What a file leaves open: keys whose default depends on other keys, the number of workers, the mesh.

A resolved Config says everything that has a meaning; resolving it again changes nothing.
"""

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from fsdplaunch.config.schema.config import Config, KeySpec, all_keys, value_at
from fsdplaunch.config.schema.kinds import STRATEGY, DtypeName
from fsdplaunch.config.schema.launch_sections import PrecisionSection
from fsdplaunch.config.schema.sharding_sections import FsdpConfig, ParallelismConfig
from fsdplaunch.display_text import counted
from fsdplaunch.errors import UsageError

_READ = frozenset(
    {
        "fsdp_auto_wrap_policy",
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_min_num_params",
        "fsdp_activation_checkpointing",
        "fsdp_ignored_modules",
        "fsdp_state_dict_type",
        "fsdp_sharding_strategy",
        "fsdp_reshard_after_forward",
    }
)
"""Keys of torch's FSDP that mean something to PyTorch/XLA's; the others say what it decides for itself."""


def is_read_by_xla(path: tuple[str, ...]) -> bool:
    """Return whether the key at a path has a meaning where PyTorch/XLA shards."""
    return path[0] not in ("sharding", "parallelism_config") and (
        not path[-1].startswith("fsdp_") or path[-1] in _READ
    )


def uses_xla(config: Config) -> bool:
    """Return whether workers compute on PyTorch/XLA's devices."""
    return config.distributed_type == "XLA" or (config.distributed_type == "FSDP" and config.fsdp_config.xla)


def shards_on_xla(config: Config) -> bool:
    """Return whether models are sharded by PyTorch/XLA."""
    return uses_xla(config) and config.fsdp_config.xla


def shards_models(config: Config) -> bool:
    """Return whether the configuration is about sharding at all, by torch's FSDP or by PyTorch/XLA's."""
    return config.distributed_type == "FSDP" or shards_on_xla(config)


def runs_spmd(config: Config) -> bool:
    """Return whether one process per host drives all of its devices (SPMD, FSDPv2)."""
    return shards_on_xla(config) and config.fsdp_config.xla_fsdp_v2


def converts_to_bf16(config: Config) -> bool:
    """Return whether PyTorch/XLA itself makes bf16 of a TPU's floats, as `accelerate launch` has it.

    Models that PyTorch/XLA's FSDP shards have their compute_dtype instead, and keep their parameters.
    """
    return config.distributed_type == "XLA" and config.mixed_precision == "bf16" and not shards_on_xla(config)


REST = -1  # a mesh size that means: what the other sizes leave
KEEPS_GATHERED = {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"}
"""Strategies under which parameters stay gathered from forward to backward."""


def resolve(config: Config) -> Config:
    """Return the Config with every value decided that is None as read: decided from the rest."""
    version = config.fsdp_config.fsdp_version or default_version(config)
    config = _processes_of_xla(config)
    if config.distributed_type == "NO" and config.num_machines == 1 and config.launch.workers_per_node is None:
        config = replace(config, num_processes=1)  # whatever it says, as in accelerate
    fill = _version_1 if version == 1 else _version_2
    fsdp = replace(config.fsdp_config, fsdp_version=version, **fill(config.fsdp_config))
    if fsdp.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP" and not fsdp.fsdp_min_num_params:
        fsdp = replace(fsdp, fsdp_auto_wrap_policy="NO_WRAP")  # units of at least no parameters, as in accelerate
    if fsdp.fsdp_cpu_ram_efficient_loading is None:
        fsdp = replace(fsdp, fsdp_cpu_ram_efficient_loading=fsdp.fsdp_sync_module_states is not False)
    return replace(
        config, fsdp_config=fsdp, parallelism_config=_mesh(config, fsdp), precision=_precision(config, version)
    )


def _processes_of_xla(config: Config) -> Config:
    """Take num_processes for the devices of a CPU: PyTorch/XLA's processes are as many as hosts or TPU chips."""
    if not uses_xla(config):
        return config
    configured, per_node = config.num_processes, config.launch.workers_per_node
    spmd = runs_spmd(config)
    of_cpu = (configured if isinstance(configured, int) else 2) if spmd else 1
    fixed = per_node if isinstance(per_node, int) else 1 if spmd else None
    section = replace(
        config.xla,
        processes_per_host=config.xla.processes_per_host or fixed,
        cpu_devices=config.xla.cpu_devices or of_cpu,
    )
    launch, dynamo = replace(config.launch, workers_per_node=None), config.dynamo_config
    if not config.fsdp_config.xla:  # as accelerate's TPUs
        dynamo = replace(dynamo, dynamo_backend="NO")
    return replace(config, xla=section, num_processes="auto", launch=launch, dynamo_config=dynamo)


def default_version(config: Config) -> int:
    """Return the FSDP version of a file that names none: 1 if written for FSDP1 or for accelerate, else 2.

    A key of FSDP1 that holds its default does not show here; `load` sees which keys a file says.
    """
    if config.compute_environment is not None:
        return 1
    if any(value_at(config, spec.path) != spec.default for spec in keys_of_version_1()):
        return 1
    return 1 if config.fsdp_config.fsdp_state_dict_type == "LOCAL_STATE_DICT" else 2


def keys_of_version_1() -> tuple[KeySpec, ...]:
    """Return the keys that only files for FSDP1 say; accelerate has fsdp_sync_module_states there only."""
    also = ("fsdp_config", "fsdp_sync_module_states")
    return tuple(spec for spec in all_keys() if spec.key.versions == (1,) or spec.path == also)


def strategy_named(reshard: bool | int | str | None) -> str | None:
    """Read fsdp_reshard_after_forward as FSDP1 does: a strategy's name or code."""
    if isinstance(reshard, str):
        return reshard
    if reshard is None or isinstance(reshard, bool) or not 1 <= reshard <= len(STRATEGY.choices):
        return None
    return STRATEGY.choices[reshard - 1]


def _version_1(fsdp: FsdpConfig) -> dict[str, Any]:
    return {
        "fsdp_sharding_strategy": fsdp.fsdp_sharding_strategy
        or strategy_named(fsdp.fsdp_reshard_after_forward)
        or "FULL_SHARD",
        "fsdp_reshard_after_forward": None,
        "fsdp_backward_prefetch": fsdp.fsdp_backward_prefetch or "BACKWARD_PRE",
        "fsdp_state_dict_type": fsdp.fsdp_state_dict_type or "FULL_STATE_DICT",
        "fsdp_sync_module_states": fsdp.fsdp_sync_module_states is not False,
    }


def _version_2(fsdp: FsdpConfig) -> dict[str, Any]:
    reshard = fsdp.fsdp_reshard_after_forward
    if reshard is None:
        reshard = fsdp.fsdp_sharding_strategy not in KEEPS_GATHERED
    if not isinstance(reshard, bool) and reshard in (0, 1):
        reshard = bool(reshard)
    return {
        "fsdp_sharding_strategy": fsdp.fsdp_sharding_strategy or ("FULL_SHARD" if reshard else "SHARD_GRAD_OP"),
        "fsdp_reshard_after_forward": reshard,
        "fsdp_state_dict_type": fsdp.fsdp_state_dict_type or "SHARDED_STATE_DICT",
        # FSDP2 decides these for itself; a note says so where a file has them.
        "fsdp_backward_prefetch": None,
        "fsdp_use_orig_params": True,
        "fsdp_limit_all_gathers": True,
    }


def _mesh(config: Config, fsdp: FsdpConfig) -> ParallelismConfig:
    """Translate the strategies that mean a mesh under FSDP2. Sizes that are set stay."""
    configured = config.parallelism_config
    replicas, shards = configured.parallelism_config_dp_replicate_size, configured.parallelism_config_dp_shard_size
    strategy = fsdp.fsdp_sharding_strategy or "FULL_SHARD"
    if fsdp.fsdp_version == 1 or config.distributed_type != "FSDP":
        pass
    elif strategy == "NO_SHARD":
        replicas, shards = replicas or REST, shards or 1
    elif strategy.startswith("HYBRID") and replicas is None:
        replicas = config.num_machines if shards in (None, REST) else REST
    return replace(
        configured, parallelism_config_dp_replicate_size=replicas or 1, parallelism_config_dp_shard_size=shards
    )


def _precision(config: Config, version: int) -> PrecisionSection:
    configured = config.precision
    compute: DtypeName | None = None
    if config.mixed_precision != "no":
        compute = "fp16" if config.mixed_precision == "fp16" else "bf16"  # fp8 computes its other layers in bf16
    param = configured.param or compute
    lower = param not in (None, "fp32")
    return replace(
        configured,
        param=param,
        reduce=configured.reduce or ("fp32" if lower else None),
        buffer=configured.buffer or (compute if version == 1 else None),
        master=configured.master or ("fp32" if lower else None),
    )


CPU_WORKERS = 2  # workers for `auto` on a node without GPUs: the fewest between which something is sharded


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
    total, nodes = config.num_processes, config.num_machines
    return total // nodes if configured is None and isinstance(total, int) and total % nodes == 0 else None


def world_size(config: Config) -> int | None:
    """Return workers over all nodes, or None when that depends on the nodes' GPUs."""
    if isinstance(config.num_processes, int):
        return config.num_processes
    configured = config.launch.workers_per_node
    return configured * config.num_machines if isinstance(configured, int) else None


class AxisSizes(NamedTuple):
    """Ranks along each axis of the mesh; -1 for what the others leave."""

    replicas: int = 1  # replicas of the model
    shards: int = REST  # ranks that read different data and share one replica's shards
    context: int = 1  # ranks that split each sequence; the shards are spread over them, too
    tensor: int = 1  # ranks that split each layer

    @property
    def world(self) -> int:
        """Return the workers they need, -1 counted as one."""
        return prod(max(size, 1) for size in self)

    def __str__(self) -> str:
        """Return the sizes as messages show them, without axes of one that plain FSDP does not have."""
        return " x ".join(map(str, (*self[:2], *(size for size in self[2:] if size != 1))))


def configured_axes(config: Config) -> AxisSizes:
    """Return the sizes as configured."""
    sizes = config.parallelism_config
    return AxisSizes(
        replicas=sizes.parallelism_config_dp_replicate_size or 1,
        shards=sizes.parallelism_config_dp_shard_size or REST,
        context=sizes.parallelism_config_cp_size,
        tensor=sizes.parallelism_config_tp_size,
    )


def split_world(world: int, sizes: AxisSizes) -> AxisSizes:
    """Return the sizes, -1 replaced by what the others leave; where replicas and shards both are, all ranks shard.

    They fit when their product is `world`.
    """
    if sizes.replicas == sizes.shards == REST:
        sizes = sizes._replace(replicas=1)
    rest = world // sizes.world
    return AxisSizes(*(rest if size == REST else size for size in sizes))


def mesh_sizes(config: Config, world: int) -> AxisSizes:
    """Return the sizes of a resolved Config's axes for a number of workers over all nodes, which is their product.

    Raises:
        UsageError: The sizes do not fit.
    """
    sizes = configured_axes(config)
    found = split_world(world, sizes)
    if found.world != world or min(found) < 1:
        msg = f"a mesh of {sizes} does not fit {counted(world, 'worker')}"
        raise UsageError(msg, hint="the sizes must multiply to the number of workers; -1 takes the rest")
    return found


def with_mesh(config: Config, world: int) -> Config:
    """Return the Config with all mesh sizes as numbers, which is what other libraries read from the environment.

    A mesh of one dimension stays unset, and so do sizes of a run that shards nothing: it has no mesh to lay out.

    Raises:
        UsageError: The sizes do not fit the number of workers.
    """
    if config.distributed_type != "FSDP" or has_one_axis(config):
        return config
    found = mesh_sizes(config, world)
    mesh = replace(
        config.parallelism_config,
        parallelism_config_dp_replicate_size=found.replicas,
        parallelism_config_dp_shard_size=found.shards,
        parallelism_config_cp_size=found.context,
        parallelism_config_tp_size=found.tensor,
    )
    return replace(config, parallelism_config=mesh)


def has_one_axis(config: Config) -> bool:
    """Return whether a resolved Config names no mesh: all ranks share the shards of one replica."""
    unset = config.parallelism_config.parallelism_config_dp_shard_size is None
    return unset and configured_axes(config) == AxisSizes()
