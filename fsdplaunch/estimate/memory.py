"""How many bytes each GPU and each host need: arithmetic on a model's sizes, at four moments of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fsdplaunch.estimate.activations import Activations, activations_of
from fsdplaunch.estimate.families.parts import ActivationShape
from fsdplaunch.estimate.fsdp_units import split_into_units
from fsdplaunch.estimate.model_sizes import ModelSizes, UnitSize
from fsdplaunch.estimate.training_setup import TrainingSetup
from fsdplaunch.probe.memory_plan import STATES, kept_bytes

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
