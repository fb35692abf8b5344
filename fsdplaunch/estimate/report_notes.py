"""What should be known about an estimate's numbers: what is not counted, what does not fit, what is exchanged."""

from collections.abc import Iterator

from fsdplaunch.byte_sizes import GIB
from fsdplaunch.estimate.memory import CONTEXT, MemoryCase, MemoryNeed
from fsdplaunch.estimate.split_sequences import divides_heads, goes_in_ring, sent_bytes
from fsdplaunch.estimate.training_setup import TrainingSetup


def own_notes(case: MemoryCase, need: MemoryNeed, host_memory: int | None) -> list[str]:
    """Return what should be known about the numbers of one way to shard.

    Args:
        case: The model.
        need: What that way needs.
        host_memory: Of this node, in bytes; None when unknown or when the run is elsewhere.
    """
    notes = []
    setup = need.setup
    if not need.has_activations:
        notes.append("activations are not counted: the folder has no config.json of a known model type")
    if need.context:
        notes.append(
            f"{CONTEXT / GIB:.2f} GiB of each GPU are counted for the CUDA context, cuBLAS and NCCL: an assumption"
        )
    if case.shape is not None and 0 < case.shape.max_length < setup.length:
        notes.append(f"sequences of {setup.length} are longer than the model's {case.shape.max_length}")
    if host_memory is not None:
        for amount, what in ((need.host_per_node, "training"), (need.loading, "loading the weights")):
            if amount > host_memory:
                notes.append(
                    f"{what} needs {amount / GIB:.0f} GiB of host memory per node, "
                    f"this one has {host_memory / GIB:.0f}"
                )
    rows = max((unit.rows for unit in (case.sizes.root, *case.sizes.blocks)), default=1)
    if setup.shards > rows and setup.version != 1:
        notes.append(f"no tensor has {setup.shards} rows: some ranks hold nothing")
    return [*notes, *_exchanges(case, setup)]


def _exchanges(case: MemoryCase, setup: TrainingSetup) -> Iterator[str]:
    """Yield what ranks that split layers or sequences exchange in one step, beside what FSDP does."""
    shape = case.shape
    if shape is None:
        return
    width = setup.widths(case.sizes)[1]
    if setup.tensor > 1:
        amount = 4 * shape.layers * setup.tokens // setup.context * shape.hidden * width
        yield f"the {setup.tensor} ranks that split layers add up {amount / GIB:.2f} GiB of activations per step"
    if shape.head_count % setup.tensor:
        yield (
            f"tp_size {setup.tensor} does not divide the model's {shape.head_count} heads: its attention cannot be"
            " split by heads"
        )
    if not divides_heads(shape, setup):
        yield (
            f"cp_size {setup.context} does not divide the model's {shape.head_count} heads: training would stop"
            " at its first step; set sharding.context_parallel_attention to auto or ring"
        )
    elif setup.context > 1:
        what = "keys and values in a ring" if goes_in_ring(shape, setup) else "positions for heads"
        amount = sent_bytes(shape, setup, width)
        yield f"the {setup.context} ranks that split sequences send {amount / GIB:.2f} GiB each per step, {what}"
