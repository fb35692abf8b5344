"""Count the bytes that one rank needs: parameters, gradients, optimizer, gathered units, activations.

Activations are an approximation for the families of `families`; the exact way is to trace the step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fsdplaunch.config.resolve import CPU_WORKERS, KEEPS_GATHERED, mesh_sizes, workers_per_node, world_size
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.kinds import SequenceAttentionName
from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.families import ActivationShape
from fsdplaunch.estimate.model import ModelSizes, TensorSize, UnitSize
from fsdplaunch.probe.memory_plan import ITEMSIZES, STATES, kept_bytes

LENGTH = 2048
"""Tokens of a sequence where neither the user nor the model says less."""


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


def split_into_units(sizes: ModelSizes, setup: TrainingSetup) -> tuple[UnitSize, tuple[UnitSize, ...]]:
    """Return what the root gathers, and the other units.

    Args:
        sizes: The model.
        setup: Says the policy.
    """
    if setup.wrap == "NO_WRAP":
        return _unit("", sizes.names.values()), ()
    if setup.wrap == "SIZE_BASED_WRAP":
        return _by_size(sizes, setup.smallest)
    return sizes.root, sizes.blocks


def _unit(name: str, tensors: Iterable[TensorSize]) -> UnitSize:
    content = Counter(tensors)
    return UnitSize(name=name, count=1, tensors=tuple(sorted(content.items(), key=lambda item: item[0].shape)))


def _by_size(sizes: ModelSizes, smallest: int) -> tuple[UnitSize, tuple[UnitSize, ...]]:
    """Walk bottom-up as torch's policy does; lists of modules are never units themselves."""
    tree: dict[str, dict[str, int]] = {"": {}}
    weights: Counter[str] = Counter()
    for name, tensor in sizes.names.items():
        parts = name.split(".")[:-1]
        for length in range(len(parts) + 1):
            weights[".".join(parts[:length])] += tensor.numel
        for length in range(len(parts)):
            tree.setdefault(".".join(parts[:length]), {})[".".join(parts[: length + 1])] = 0
    chosen: list[str] = []
    _walk("", tree, weights, smallest, chosen)
    homes: dict[str, list[TensorSize]] = {name: [] for name in ("", *chosen)}
    for name, tensor in sizes.names.items():
        parts = name.split(".")[:-1]
        inside = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        homes[next((unit for unit in inside if unit in homes), "")].append(tensor)
    return _unit("", homes.pop("")), tuple(_unit(name, tensors) for name, tensors in homes.items())


def _walk(
    name: str, tree: Mapping[str, Mapping[str, int]], weights: Mapping[str, int], smallest: int, chosen: list[str]
) -> int:
    own = weights[name]
    if own < smallest:
        return 0
    children = tree.get(name, {})
    taken = sum(_walk(child, tree, weights, smallest, chosen) for child in children)
    is_list = bool(children) and all(child.rpartition(".")[2].isdecimal() for child in children)
    if name and not is_list and own - taken >= smallest:
        chosen.append(name)
        return own
    return taken


FP32 = 4
_AT_ONCE_BY_HEADS, _AT_ONCE_IN_RING = 8, 6
"""Tensors of the size of queries that backward has at a time beside what is kept: counted by torch's profiler."""


def goes_in_ring(shape: ActivationShape, setup: TrainingSetup) -> bool:
    """Return whether keys and values go around, as attention decides when it meets the heads."""
    if setup.context == 1 or setup.attention == "heads":
        return False
    return setup.attention == "ring" or _heads(shape, setup) % setup.context > 0


def divides_heads(shape: ActivationShape, setup: TrainingSetup) -> bool:
    """Return whether the heads can be divided among the ranks as configured; a ring needs nothing of them."""
    return setup.attention != "heads" or _heads(shape, setup) % setup.context == 0


def kept_per_token(shape: ActivationShape, setup: TrainingSetup, width: int) -> int:
    """Return the bytes that a block keeps for one of a rank's tokens beside what an attention in one piece does.

    By heads the result is kept twice, as attention and as the layer after it see it, and too few heads of keys are
    repeated.

    Args:
        shape: What one rank has of the model's.
        setup: The run.
        width: Bytes per element of the computation.
    """
    if setup.context == 1 or goes_in_ring(shape, setup):
        return 0
    return width * (shape.heads + 2 * (_exchanged_keys(shape, setup) - shape.keys))


def attention_at_once(shape: ActivationShape, setup: TrainingSetup, width: int) -> int:
    """Return the bytes that backward of one attention has at a time beside what is kept.

    Args:
        shape: What one rank has of the model's.
        setup: The run.
        width: Bytes per element of the computation.
    """
    if setup.context == 1:
        return 0
    inside = setup.tokens // setup.context
    if not goes_in_ring(shape, setup):
        return inside * _AT_ONCE_BY_HEADS * shape.heads * width
    repeated = 2 * shape.heads if shape.keys < shape.heads else 0
    messages = 2 * shape.keys * (1 if setup.context == 2 else 2)  # noqa: PLR2004  (the next one travels)
    in_width = _AT_ONCE_IN_RING * shape.heads + repeated + messages
    in_fp32 = shape.heads + 2 * (2 * shape.keys)  # what is added up, and what travels of it
    return inside * (in_width * width + in_fp32 * max(width, FP32))


def _heads(shape: ActivationShape, setup: TrainingSetup) -> int:
    return shape.head_count // setup.tensor


def _exchanged_keys(shape: ActivationShape, setup: TrainingSetup) -> int:
    """Return the elements of a token's keys as ranks exchange them: those of queries where they are repeated."""
    count = shape.keys * _heads(shape, setup) // shape.heads
    return shape.keys if goes_in_ring(shape, setup) or count % setup.context == 0 else shape.heads


_STEPS_OF_GELU = 5
"""Tensors that gelu written out (0.5 x (1 + tanh(...))) saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes on one rank.

    Attributes:
        block: Kept by one block that is not checkpointed.
        kept: Kept by all blocks from forward to backward.
        logits: Output and loss, at the end of forward.
        loss: What the loss's backward adds to that.
        attention: What backward of a split attention has at a time, beside what is kept.
    """

    block: int
    kept: int
    logits: int
    loss: int
    attention: int = 0


def activations_of(shape: ActivationShape, setup: TrainingSetup, width: int) -> Activations:
    """Count activations.

    Args:
        shape: The model's.
        setup: Says batch, length, checkpointing, and how many ranks split layers and sequences.
        width: Bytes per element of the computation.
    """
    tokens, inside = setup.tokens, setup.tokens // setup.context
    split = replace(
        shape,
        heads=shape.heads // setup.tensor,
        keys=shape.keys // setup.tensor,
        ffn=shape.ffn // setup.tensor,
        eager=shape.eager // (setup.tensor * setup.context),
    )
    per_token = _per_token(split, width) + kept_per_token(split, setup, width)
    block = round(inside * per_token) + _weights(split, setup, width)
    entry = tokens * shape.hidden * width
    if not setup.checkpointing:
        kept = shape.layers * block
    else:
        kept = 0 if setup.checkpoint_offload else shape.layers * entry // setup.context
    scores = tokens * shape.vocab
    capped = width if shape.capped else 0
    logits = scores * (width + FP32 + capped)  # the loss is computed in fp32
    return Activations(
        block=block,
        kept=kept + entry,
        logits=logits,
        loss=scores * 2 * FP32,
        attention=attention_at_once(split, setup, width),
    )


def _per_token(shape: ActivationShape, width: int) -> float:
    h, q, kv = shape.hidden, shape.heads, shape.keys
    norm = (FP32 * h + width * h if width < FP32 else 2 * width * h) if shape.full_norm else width * h
    head_norm = (FP32 + width) * (q + kv) if width < FP32 else 2 * width * (q + kv)
    attention = width * (h + 2 * q + 2 * kv)
    inside = shape.ffn * (4 if shape.gated else _STEPS_OF_GELU if shape.composite else 2)
    return (
        shape.norms * norm
        + (head_norm if shape.head_norms else 0)
        + attention
        + width * (h + inside)
        + shape.dropout * h * (width + 1)
    )


def _weights(shape: ActivationShape, setup: TrainingSetup, width: int) -> int:
    """Return the bytes of attention weights, where they are kept: scores, softmax, what dropout makes of it."""
    pairs = setup.batch_size * shape.eager * setup.length * setup.length
    each = FP32 + (width if width < FP32 else 0) + 2 * width if shape.capped else width + 2
    return pairs * each


PARTS = ("parameters", "gradients", "optimizer", "gathered", "communication", "activations", "temporary")
"""What memory is for, in the order it is shown."""
CONTEXT = 768 * 1024**2
"""Memory of a GPU that torch does not count: CUDA context, cuBLAS, NCCL. An assumption, not measured."""
Verdict = Literal["fits", "close", "does not fit", "unknown"]
COMFORT = 0.9
"""Share of a GPU's memory up to which a plan fits: the allocator rounds and leaves gaps."""
MOMENTS = {
    "loss": "the loss, between forward and backward",
    "backward": "backward of a block",
    "reduce": "the end of backward, when the last gradients are summed",
    "step": "the optimizer's step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What a run needs.

    Attributes:
        setup: The run.
        moments: Bytes on the GPU at each moment, by what they are for.
        context: Bytes that the GPU's driver and libraries take on top.
        host: Bytes per rank in host memory while training.
        loading: Bytes per node in host memory while weights are read.
        checkpoint: Bytes of one checkpoint, over all files.
        has_activations: Whether activations are known and counted.
    """

    setup: TrainingSetup
    moments: Mapping[str, Mapping[str, int]]
    context: int
    host: int
    loading: int
    checkpoint: int
    has_activations: bool

    @property
    def moment(self) -> str:
        """Return when most is needed."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def parts(self) -> Mapping[str, int]:
        """Return bytes at the peak, by what they are for."""
        return self.moments[self.moment]

    @property
    def total(self) -> int:
        """Return bytes that torch allocates on the GPU at the peak."""
        return sum(self.parts.values())

    @property
    def gpu(self) -> int:
        """Return bytes of the GPU that are in use at the peak, by whomever."""
        return self.total + self.context

    @property
    def host_per_node(self) -> int:
        """Return bytes of host memory on each node while training."""
        return self.host * self.setup.per_node


def memory_need(sizes: ModelSizes, shape: ActivationShape | None, setup: TrainingSetup) -> MemoryNeed:
    """Count what a run needs.

    Args:
        sizes: The model's tensors.
        shape: What its activations depend on; None where that is not known, and then they are left out.
        setup: The run.
    """
    root, blocks = split_into_units(sizes, setup)
    root, blocks = root.split(setup.tensor), tuple(unit.split(setup.tensor) for unit in blocks)
    kept = _kept(sizes, root, blocks, setup)
    _, compute, reduce = setup.widths(sizes)
    acts = activations_of(shape, setup, compute) if shape else Activations(block=0, kept=0, logits=0, loss=0)
    moments = _moments(_Bytes(root, blocks, setup, compute, reduce), kept, acts, shape, sizes)
    host = 0
    if setup.offload:
        host = sum(kept.values())
        flat = setup.version == 1
        moving = compute * max(unit.share(setup.shards, flat=flat) for unit in (root, *blocks))  # copied in
        moments = {
            name: {**parts, **dict.fromkeys(kept, 0), "communication": parts["communication"] + moving}
            for name, parts in moments.items()
            if name != "step"
        }
    master = setup.widths(sizes)[0]
    readers = 1 if setup.ram_efficient else setup.per_node
    return MemoryNeed(
        setup=setup,
        moments=moments,
        context=CONTEXT if setup.on_gpu else 0,
        host=host,
        loading=sizes.stored * readers + host * setup.per_node,
        checkpoint=sizes.parameters * master * (1 + STATES[setup.optimizer]),
        has_activations=shape is not None,
    )


def _kept(sizes: ModelSizes, root: UnitSize, blocks: tuple[UnitSize, ...], setup: TrainingSetup) -> dict[str, int]:
    """Return what stays for the whole run, and gradients."""
    flat = setup.version == 1
    held = sum(unit.share(setup.shards, flat=flat) * unit.count for unit in (root, *blocks))
    return kept_bytes(held, setup.widths(sizes)[0], setup.optimizer)


class _Bytes:
    """Bytes of full units in the dtypes they are gathered and summed in."""

    def __init__(
        self, root: UnitSize, blocks: tuple[UnitSize, ...], setup: TrainingSetup, compute: int, reduce: int
    ) -> None:
        largest = max((unit.parameters for unit in blocks), default=0)
        every = sum(unit.parameters * unit.count for unit in blocks)
        self.root = root.parameters * compute
        self.root_reduce = root.parameters * reduce
        self.block = largest * compute
        self.block_reduce = largest * reduce
        self.held = 0 if not setup.keeps else every * compute // setup.keeps
        self.is_kept = setup.keeps == 1
        self.compute = compute


def _moments(
    size: _Bytes, kept: Mapping[str, int], acts: Activations, shape: ActivationShape | None, sizes: ModelSizes
) -> dict[str, dict[str, int]]:
    ahead = 0 if size.is_kept else size.block
    head = min(size.root, _head(shape, sizes) * size.compute)
    nothing = dict.fromkeys(PARTS, 0)
    before = {**nothing, "parameters": kept["parameters"], "optimizer": kept["optimizer"]}
    current = 0 if size.is_kept else size.block
    return {
        "loss": {
            **before,
            "gathered": size.root + size.held,
            "communication": ahead,
            "activations": acts.kept + acts.logits,
            "temporary": acts.loss,
        },
        "backward": {
            **before,
            "gathered": size.root + size.held + current,
            "communication": ahead + size.block_reduce,
            "activations": max(acts.kept, acts.block) if acts.kept else acts.block,
            "temporary": head + size.block + max(acts.block, acts.attention),
        },
        "reduce": {
            **before,
            "gradients": kept["gradients"],
            "gathered": size.root,
            "communication": size.root_reduce,
            "temporary": size.root,
        },
        "step": {**before, "gradients": kept["gradients"], "temporary": kept["parameters"]},
    }


def _head(shape: ActivationShape | None, sizes: ModelSizes) -> int:
    """Return parameters whose full gradient waits for the end of backward: the output head's."""
    if shape is None:
        return max((tensor.numel for tensor, _ in sizes.root.tensors), default=0)
    return shape.vocab * shape.hidden


def verdict_of(need: int, memory: int | None) -> Verdict:
    """Say whether a need fits a memory, both in bytes.

    Args:
        need: At the peak.
        memory: Of one GPU; None when it is not known.
    """
    if memory is None:
        return "unknown"
    if need <= COMFORT * memory:
        return "fits"
    return "close" if need <= memory else "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """A model, and a way to count what a setup of it needs."""

    sizes: ModelSizes
    shape: ActivationShape | None

    def need(self, setup: TrainingSetup) -> MemoryNeed:
        """Return what a setup needs."""
        return memory_need(self.sizes, self.shape, setup)
