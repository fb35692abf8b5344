"""Count the bytes that one rank needs: parameters, gradients, optimizer, gathered units, activations.

Activations are an approximation for the families of `model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fsdplaunch.config.resolve import CPU_WORKERS, KEEPS_GATHERED, mesh_sizes, workers_per_node, world_size
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.model import ActivationShape, Model, ModelSizes, UnitSize, unit_of

LENGTH = 2048
"""Tokens of a sequence where neither the user nor the model says less."""
FP32 = 4
_ITEMSIZES = {"fp32": FP32, "bf16": 2, "fp16": 2}
STATES = {"adamw": 2, "adam": 2, "nadam": 2, "adagrad": 1, "rmsprop": 1, "momentum": 1, "sgd": 0}
"""Tensors that each optimizer keeps per parameter, of the parameter's own size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """Everything that decides how many bytes a rank needs, beside the model."""

    strategy: str  # name of the sharding strategy, for people
    world: int  # ranks over all nodes
    per_node: int  # ranks on each node
    shards: int  # ranks that one replica of the model is sharded over; those that split sequences count, too
    tensor: int = 1  # ranks that split each layer
    context: int = 1  # ranks that split each sequence
    keeps: int = 0  # after forward gathered parameters are freed (0), kept (1), or kept split over so many ranks
    version: int = 2  # of FSDP
    master: int = 0  # bytes per element of what is kept; 0 for the model's own
    compute: int = 0  # bytes per element of what is gathered and computed with; 0 for that of what is kept
    reduce: int = 0  # bytes per element of gradients as they are summed; 0 for the dtype of the computation
    offload: bool = False  # whether what is kept lies in host memory
    checkpoint_every: int = 0  # every so many blocks one is computed again in backward; 0 for none
    checkpoint_offload: bool = False  # whether checkpointed inputs wait in host memory
    async_save: bool = False  # whether saves copy what is kept to host memory first
    optimizer: str = "adamw"  # its name
    whole: bool = False  # whether the whole model is one unit
    batch_size: int = 1  # sequences per rank and step
    length: int = LENGTH  # tokens of each
    on_gpu: bool = True  # whether the run computes on GPUs
    ram_efficient: bool = True  # whether only one rank of a node reads weights

    @property
    def replicas(self) -> int:
        """Return the replicas of the model over all nodes."""
        return self.spread // self.shards

    @property
    def spread(self) -> int:
        """Return the most ranks that one replica can be sharded over; those that split layers count once."""
        return max(self.world // self.tensor, 1)

    def widths(self, sizes: ModelSizes) -> tuple[int, int, int]:
        """Return bytes per element of what is kept, computed with, and summed over ranks, for this model."""
        master = self.master or sizes.itemsize
        compute = self.compute or master
        return master, compute, self.reduce or compute


def training_setup(
    config: Config, *, world: int, per_node: int, batch_size: int, length: int, optimizer: str, on_gpu: bool
) -> TrainingSetup:
    """Take from a configuration what memory depends on; the arguments are those of `TrainingSetup`."""
    if optimizer not in STATES:
        msg = f"the optimizer {optimizer!r} is not known"
        raise UsageError(msg, hint=f"one of {', '.join(STATES)}")
    fsdp, precision, mesh = config.fsdp_config, config.precision, mesh_sizes(config, world)
    strategy = fsdp.fsdp_sharding_strategy or "FULL_SHARD"
    reshard = fsdp.fsdp_reshard_after_forward
    if fsdp.fsdp_version == 1 or isinstance(reshard, str | None):
        keeps = int(strategy in KEEPS_GATHERED)
    else:
        keeps = int(not reshard) if isinstance(reshard, bool) else int(reshard)
    shards = mesh.shards * mesh.context
    if strategy == "NO_SHARD":
        shards = 1
    elif strategy.startswith("HYBRID") and mesh.replicas == 1 and world > per_node:
        shards = max(per_node // mesh.tensor, 1)
    return TrainingSetup(
        strategy=strategy,
        world=world,
        per_node=per_node,
        shards=shards,
        tensor=mesh.tensor,
        context=mesh.context,
        keeps=keeps,
        version=fsdp.fsdp_version or 2,
        master=_ITEMSIZES.get(precision.master or "", 0),
        compute=_ITEMSIZES.get(precision.param or "", 0),
        reduce=_ITEMSIZES.get(precision.reduce or "", 0),
        offload=fsdp.fsdp_offload_params and on_gpu,
        checkpoint_every=config.sharding.checkpoint_every if fsdp.fsdp_activation_checkpointing else 0,
        checkpoint_offload=fsdp.fsdp_activation_checkpointing_offload and on_gpu,
        async_save=config.checkpoint.async_,
        optimizer=optimizer,
        whole=fsdp.fsdp_auto_wrap_policy == "NO_WRAP",
        batch_size=batch_size,
        length=length,
        on_gpu=on_gpu,
        ram_efficient=bool(fsdp.fsdp_cpu_ram_efficient_loading),
    )


def ranks_of(config: Config, *, gpus: int, given: int | None) -> tuple[int, int]:
    """Return ranks over all nodes, of which `given` is the command line's number, and ranks on each."""
    here = workers_per_node(config) or gpus
    world = given or world_size(config) or (here or CPU_WORKERS) * config.num_machines
    per_node = here or min(world, 8)  # most machines with GPUs have 8
    if given is not None and (per_node > world or world % per_node):
        per_node = next(size for size in range(min(per_node, world), 0, -1) if world % size == 0)
    return world, per_node


def alternatives(yours: TrainingSetup) -> list[TrainingSetup]:
    """Return the other ways to shard the same run, the one that needs least communication last."""
    full = replace(yours, offload=False, strategy="FULL_SHARD", shards=yours.spread, keeps=0)
    found = [full, replace(full, strategy="SHARD_GRAD_OP", keeps=1)]
    if yours.world > yours.per_node > 1:
        inside = replace(full, strategy="HYBRID_SHARD", shards=max(yours.per_node // yours.tensor, 1))
        found += [inside, replace(inside, strategy="HYBRID_SHARD_ZERO2", keeps=1)]
    found.append(replace(full, strategy="NO_SHARD", shards=1))
    if yours.on_gpu:
        found.append(replace(full, offload=True))
    mine = (yours.shards, yours.keeps, yours.offload)
    return [other for other in found if (other.shards, other.keeps, other.offload) != mine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes on one rank."""

    block: int = 0  # kept by one block that is not checkpointed
    kept: int = 0  # kept by all blocks from forward to backward
    logits: int = 0  # output and loss, at the end of forward
    loss: int = 0  # what the loss's backward adds to that


def activations_of(shape: ActivationShape, setup: TrainingSetup, width: int) -> Activations:
    """Count activations that are computed in `width` bytes per element."""
    tokens = setup.batch_size * setup.length
    inside = tokens // setup.context
    h, q, kv = shape.hidden, shape.heads // setup.tensor, shape.keys // setup.tensor
    in_fp32 = FP32 + width if width < FP32 else 2 * width  # a norm that is computed step by step
    per_token = (
        shape.norms * in_fp32 * h
        + (in_fp32 * (q + kv) if shape.head_norms else 0)
        + width * (2 * h + 2 * q + 2 * kv + 4 * (shape.ffn // setup.tensor))
    )
    # Attention weights, where they are kept: scores, softmax, what dropout makes of it.
    eager = shape.eager // (setup.tensor * setup.context)
    each = FP32 + (width if width < FP32 else 0) + 2 * width if shape.capped else width + 2
    block = inside * per_token + setup.batch_size * eager * setup.length * setup.length * each
    entry = tokens * h * width
    again = shape.layers // setup.checkpoint_every if setup.checkpoint_every else 0
    kept = (shape.layers - again) * block
    kept += 0 if setup.checkpoint_offload else again * entry // setup.context
    scores = tokens * shape.vocab
    logits = scores * (width + FP32 + (width if shape.capped else 0))  # the loss is computed in fp32
    return Activations(block=block, kept=kept + entry, logits=logits, loss=scores * 2 * FP32)


PARTS = ("parameters", "gradients", "optimizer", "gathered", "communication", "activations", "temporary")
"""What memory is for, in the order it is shown."""
CONTEXT = 768 * 1024**2
"""Memory of a GPU that torch does not count: CUDA context, cuBLAS, NCCL. An assumption, not measured."""
Verdict = Literal["fits", "close", "does not fit", "unknown"]
COMFORT = 0.9  # share of a GPU's memory up to which a plan fits: the allocator rounds and leaves gaps
MOMENTS = {
    "loss": "the loss, between forward and backward",
    "backward": "backward of a block",
    "reduce": "the end of backward, when the last gradients are summed",
    "step": "the optimizer's step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What a run needs."""

    setup: TrainingSetup  # the run
    moments: Mapping[str, Mapping[str, int]]  # bytes on the GPU at each moment, by what they are for
    context: int  # bytes that the GPU's driver and libraries take on top
    host: int  # bytes per rank in host memory while training: what is offloaded, and the copy of an async save
    loading: int  # bytes per node in host memory while weights are read
    building: int  # the same where each rank builds the whole model, as a script of its own does
    checkpoint: int  # bytes of one checkpoint, over all files

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


def memory_need(model: Model, setup: TrainingSetup) -> MemoryNeed:
    """Count what a run needs; activations are left out of a model without a shape."""
    sizes, shape = model.sizes, model.shape
    root, blocks = sizes.root, sizes.blocks
    if setup.whole:
        root, blocks = unit_of(sizes.names.values()), ()
    root, blocks = root.split(setup.tensor), tuple(unit.split(setup.tensor) for unit in blocks)
    units, flat = (root, *blocks), setup.version == 1
    master, compute, _ = setup.widths(sizes)
    held = master * sum(unit.share(setup.shards, flat=flat) * unit.count for unit in units)
    kept = {"parameters": held, "gradients": held, "optimizer": held * STATES[setup.optimizer]}
    acts = activations_of(shape, setup, compute) if shape else Activations()
    moments = _moments(model, root, blocks, setup, kept, acts)
    host = 0
    if setup.offload:
        host = sum(kept.values())
        moving = compute * max(unit.share(setup.shards, flat=flat) for unit in units)  # copied in
        moments = {
            name: {**parts, **dict.fromkeys(kept, 0), "communication": parts["communication"] + moving}
            for name, parts in moments.items()
            if name != "step"
        }
    if setup.async_save:
        host += kept["parameters"] + kept["optimizer"]
    offloaded = sum(kept.values()) * setup.per_node if setup.offload else 0
    return MemoryNeed(
        setup=setup,
        moments=moments,
        context=CONTEXT if setup.on_gpu else 0,
        host=host,
        loading=sizes.stored * (1 if setup.ram_efficient else setup.per_node) + offloaded,
        building=sizes.parameters * master * setup.per_node + offloaded,
        checkpoint=sizes.parameters * master * (1 + STATES[setup.optimizer]),
    )


def _moments(
    model: Model,
    root: UnitSize,
    blocks: tuple[UnitSize, ...],
    setup: TrainingSetup,
    kept: Mapping[str, int],
    acts: Activations,
) -> dict[str, dict[str, int]]:
    """Return what lies on the GPU at each moment; gathered units and summed gradients in their own dtypes."""
    _, compute, reduce = setup.widths(model.sizes)
    largest = max((unit.parameters for unit in blocks), default=0)
    after_forward = sum(unit.parameters * unit.count for unit in blocks) * compute // max(setup.keeps, 1)
    gathered = root.parameters * compute + (after_forward if setup.keeps else 0)
    ahead = 0 if setup.keeps == 1 else largest * compute
    # Parameters whose full gradient waits for the end of backward: the output head's.
    head = max((tensor.numel for tensor, _ in model.sizes.root.tensors), default=0)
    head = min(root.parameters, head if model.shape is None else model.shape.vocab * model.shape.hidden)
    before = {**dict.fromkeys(PARTS, 0), "parameters": kept["parameters"], "optimizer": kept["optimizer"]}
    summed = {**before, "gradients": kept["gradients"]}
    return {
        "loss": before
        | {"gathered": gathered, "communication": ahead}
        | {"activations": acts.kept + acts.logits, "temporary": acts.loss},
        "backward": before
        | {"gathered": gathered + ahead, "communication": ahead + largest * reduce}
        | {"activations": max(acts.kept, acts.block), "temporary": (head + largest) * compute + acts.block},
        "reduce": summed
        | {"gathered": root.parameters * compute, "communication": root.parameters * reduce}
        | {"temporary": root.parameters * compute},
        "step": summed | {"temporary": kept["parameters"]},
    }


def verdict_of(need: int, memory: int | None) -> Verdict:
    """Say whether a need at the peak fits a GPU's memory, where that is known; both in bytes."""
    if memory is None:
        return "unknown"
    if need <= COMFORT * memory:
        return "fits"
    return "close" if need <= memory else "does not fit"
