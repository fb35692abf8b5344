"""How a run shards and computes, as far as memory depends on it: from a configuration, or varied from one."""

from dataclasses import dataclass, replace

from fsdplaunch.config.resolve import KEEPS_GATHERED
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.kinds import SequenceAttentionName
from fsdplaunch.config.world_size import CPU_WORKERS, mesh_sizes, workers_per_node, world_size
from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.model_sizes import ModelSizes
from fsdplaunch.probe.memory_plan import ITEMSIZES, STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """Everything that decides how many bytes a rank needs, beside the model.

    Attributes:
        strategy: Name of the sharding strategy, for people.
        world: Ranks over all nodes.
        per_node: Ranks on each node.
        shards: Ranks that one replica of the model is sharded over; those that split sequences count, too.
        tensor: Ranks that split each layer.
        context: Ranks that split each sequence.
        attention: How attention sees the other ranks' pieces, as configured.
        keeps: After forward gathered parameters are freed (0), kept (1), or kept split over so many ranks.
        version: Of FSDP.
        master: Bytes per element of what is kept; 0 for the model's own.
        compute: Bytes per element of what is gathered and computed with; 0 for that of what is kept.
        reduce: Bytes per element of gradients as they are summed; 0 for the dtype of the computation.
        offload: Whether what is kept lies in host memory.
        checkpointing: Whether blocks are computed again in backward.
        checkpoint_offload: Whether checkpointed inputs wait in host memory.
        optimizer: Its name.
        wrap: Name of the wrap policy.
        smallest: Parameters below which the size-based policy makes no unit.
        batch_size: Sequences per rank and step.
        length: Tokens of each.
        on_gpu: Whether the run computes on GPUs.
        ram_efficient: Whether only one rank of a node reads weights.
    """

    strategy: str
    world: int
    per_node: int
    shards: int
    tensor: int = 1
    context: int = 1
    attention: SequenceAttentionName = "auto"
    keeps: int = 0
    version: int = 2
    master: int = 0
    compute: int = 0
    reduce: int = 0
    offload: bool = False
    checkpointing: bool = False
    checkpoint_offload: bool = False
    optimizer: str = "adamw"
    wrap: str = "TRANSFORMER_BASED_WRAP"
    smallest: int = 100_000_000
    batch_size: int = 1
    length: int = 2048
    on_gpu: bool = True
    ram_efficient: bool = True

    @property
    def replicas(self) -> int:
        """Return the replicas of the model over all nodes."""
        return self.spread // self.shards

    @property
    def spread(self) -> int:
        """Return the most ranks that one replica can be sharded over; those that split layers count once."""
        return max(self.world // self.tensor, 1)

    @property
    def tokens(self) -> int:
        """Return the tokens per rank and step."""
        return self.batch_size * self.length

    def widths(self, sizes: ModelSizes) -> tuple[int, int, int]:
        """Return bytes per element of what is kept, computed with, and summed over ranks, for this model."""
        master = self.master or sizes.itemsize
        compute = self.compute or master
        return master, compute, self.reduce or compute


def training_setup(
    config: Config, *, world: int, per_node: int, batch_size: int, length: int, optimizer: str, on_gpu: bool
) -> TrainingSetup:
    """Take from a configuration what memory depends on.

    Args:
        config: Resolved.
        world: Ranks over all nodes.
        per_node: Ranks on each node.
        batch_size: Sequences per rank and step.
        length: Tokens of each.
        optimizer: A key of STATES.
        on_gpu: Whether the run computes on GPUs.

    Raises:
        UsageError: The mesh does not fit the ranks, or the optimizer is not known.
    """
    if optimizer not in STATES:
        msg = f"the optimizer {optimizer!r} is not known"
        raise UsageError(msg, hint=f"one of {', '.join(STATES)}")
    fsdp, precision = config.fsdp_config, config.precision
    strategy = fsdp.fsdp_sharding_strategy or "FULL_SHARD"
    reshard = fsdp.fsdp_reshard_after_forward
    if fsdp.fsdp_version == 1 or isinstance(reshard, str | None):
        keeps = int(strategy in KEEPS_GATHERED)
    else:
        keeps = int(reshard) if not isinstance(reshard, bool) else int(not reshard)
    return TrainingSetup(
        strategy=strategy,
        world=world,
        per_node=per_node,
        shards=shard_ranks(config, world, per_node),
        tensor=mesh_sizes(config, world).tensor,
        context=mesh_sizes(config, world).context,
        attention=config.sharding.context_parallel_attention,
        keeps=keeps,
        version=fsdp.fsdp_version or 2,
        master=ITEMSIZES.get(precision.master or "", 0),
        compute=ITEMSIZES.get(precision.param or "", 0),
        reduce=ITEMSIZES.get(precision.reduce or "", 0),
        offload=fsdp.fsdp_offload_params and on_gpu,
        checkpointing=fsdp.fsdp_activation_checkpointing,
        checkpoint_offload=fsdp.fsdp_activation_checkpointing_offload and on_gpu,
        optimizer=optimizer,
        wrap=fsdp.fsdp_auto_wrap_policy,
        smallest=fsdp.fsdp_min_num_params,
        batch_size=batch_size,
        length=length,
        on_gpu=on_gpu,
        ram_efficient=bool(fsdp.fsdp_cpu_ram_efficient_loading),
    )


def shard_ranks(config: Config, world: int, per_node: int) -> int:
    """Return over how many ranks one replica of the model is sharded.

    Raises:
        UsageError: The configured sizes do not fit the ranks.
    """
    strategy = config.fsdp_config.fsdp_sharding_strategy or "FULL_SHARD"
    if strategy == "NO_SHARD":
        return 1
    sizes = mesh_sizes(config, world)
    if strategy.startswith("HYBRID") and sizes.replicas == 1 and world > per_node:
        return max(per_node // sizes.tensor, 1)
    return sizes.shards * sizes.context


def ranks_of(config: Config, *, gpus: int, given: int | None) -> tuple[int, int]:
    """Return (ranks over all nodes, ranks on each).

    Args:
        config: Resolved.
        gpus: GPUs seen here.
        given: The command line's number over all nodes, or None.

    Raises:
        UsageError: The number given for is less than 1.
    """
    if given is not None and given < 1:
        msg = f"--world-size must be at least 1, got {given}"
        raise UsageError(msg)
    here = workers_per_node(config) or gpus
    world = given or world_size(config) or (here or CPU_WORKERS) * config.num_machines
    per_node = here or (world if world <= 8 else 8)  # noqa: PLR2004  (most machines with GPUs have 8)
    if given is not None and (per_node > world or world % per_node):
        per_node = next(size for size in range(min(per_node, world), 0, -1) if world % size == 0)
    return world, per_node


def alternatives(yours: TrainingSetup) -> list[TrainingSetup]:
    """Return the other ways to shard the same run, the one that needs least communication last."""
    plain = replace(yours, offload=False)
    found = [
        replace(plain, strategy="FULL_SHARD", shards=yours.spread, keeps=0),
        replace(plain, strategy="SHARD_GRAD_OP", shards=yours.spread, keeps=1),
        replace(plain, strategy="NO_SHARD", shards=1, keeps=0),
    ]
    if yours.world > yours.per_node > 1:
        inside = replace(plain, strategy="HYBRID_SHARD", shards=max(yours.per_node // yours.tensor, 1), keeps=0)
        found.insert(2, inside)
        found.insert(3, replace(inside, strategy="HYBRID_SHARD_ZERO2", keeps=1))
    if yours.on_gpu:
        found.append(replace(found[0], offload=True))
    mine = (yours.shards, yours.keeps, yours.offload)
    return [other for other in found if (other.shards, other.keeps, other.offload) != mine]
