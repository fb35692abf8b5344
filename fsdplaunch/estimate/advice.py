"""From bytes to answers: does it fit, what to change and what that saves, fewest ranks, largest batch. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fsdplaunch.estimate.memory import MemoryCase, MemoryNeed, verdict_of
from fsdplaunch.estimate.training_setup import TrainingSetup

_MOST_RANKS = 65_536
_LARGEST_BATCH = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupChange:
    """One change to a run.

    Attributes:
        what: The change, in words.
        option: How to make it: what `--set` takes, an option of the script, or a number of workers.
        cost: What it costs, in words.
        saves: Bytes per GPU; never negative.
        need: What the run needs then.
    """

    what: str
    option: str
    cost: str
    saves: int
    need: MemoryNeed


def changes(case: MemoryCase, yours: TrainingSetup) -> list[SetupChange]:
    """Return the single changes that save memory on the GPU, the largest saving first.

    Args:
        case: The model.
        yours: The run as it is.
    """
    now = case.need(yours).gpu
    found = []
    for what, option, cost, setup in _candidates(case, yours):
        need = case.need(setup)
        if need.gpu < now:
            found.append(SetupChange(what=what, option=option, cost=cost, saves=now - need.gpu, need=need))
    return sorted(found, key=lambda change: -change.saves)


def _candidates(case: MemoryCase, yours: TrainingSetup) -> Iterator[tuple[str, str, str, TrainingSetup]]:
    if not yours.checkpointing and case.shape is not None:
        yield (
            "activation checkpointing",
            "fsdp_activation_checkpointing=true",
            "about 30 % more time: every block's forward runs twice",
            replace(yours, checkpointing=True),
        )
    if yours.keeps:
        yield (
            "free gathered parameters after forward",
            "fsdp_reshard_after_forward=true" if yours.version != 1 else "fsdp_sharding_strategy=FULL_SHARD",
            "one more gather per block and step",
            replace(yours, keeps=0, strategy=yours.strategy.replace("SHARD_GRAD_OP", "FULL_SHARD")),
        )
    if yours.shards < yours.spread:
        yield (
            f"shard over all {yours.spread} ranks",
            "fsdp_sharding_strategy=FULL_SHARD",
            "gathers cross nodes" if yours.world > yours.per_node else "gathers in forward and backward",
            replace(yours, shards=yours.spread, strategy="FULL_SHARD", keeps=0),
        )
    compute = yours.widths(case.sizes)[1]
    if compute > 2:  # noqa: PLR2004
        yield (
            "compute in bf16",
            "mixed_precision=bf16",
            "rounding; faster on GPUs that have it",
            replace(yours, compute=2, reduce=4, master=4),
        )
    if not yours.offload and yours.on_gpu:
        yield (
            "offload to host memory",
            "fsdp_offload_params=true",
            "every step copies parameters and gradients over PCIe; the optimizer runs on the CPU",
            replace(yours, offload=True),
        )
    if yours.batch_size > 1 and case.shape is not None:
        half = yours.batch_size // 2
        yield (
            f"batch of {half} instead of {yours.batch_size}",
            f"a batch of {half} in the script",
            "more steps of accumulation for the same batch over all ranks",
            replace(yours, batch_size=half),
        )
    if yours.shards > 1 or yours.world == 1:
        more = resized(yours, 2 * yours.world)
        yield f"{more.world} ranks instead of {yours.world}", f"num_processes={more.world}", "more GPUs", more


def resized(yours: TrainingSetup, world: int) -> TrainingSetup:
    """Return the same run with another number of ranks, sharded in the same way."""
    inside = yours.strategy.startswith("HYBRID")
    per_node = min(yours.per_node, world)
    spread = max(1, world // yours.tensor)
    shards = 1 if yours.strategy == "NO_SHARD" else per_node if inside else max(1, spread // yours.replicas)
    return replace(yours, world=max(world, shards), per_node=per_node, shards=min(shards, spread))


def fewest_ranks(case: MemoryCase, yours: TrainingSetup, memory: int) -> int | None:
    """Return the smallest number of ranks with which the run fits, or None when no number is enough.

    Ranks beyond one node come in whole nodes.

    Args:
        case: The model.
        yours: The run; its strategy and batch per rank stay.
        memory: Of one GPU, in bytes.
    """
    if yours.strategy == "NO_SHARD":
        return 1 if _fits(case, yours, memory) else None
    single = replace(yours, shards=1, world=1)  # one replica; more replicas change nothing per rank

    def at(ranks: int) -> bool:
        if ranks % (yours.tensor * yours.context):
            return False
        spread = replace(single, world=ranks, shards=ranks // yours.tensor, per_node=min(ranks, yours.per_node))
        return _fits(case, spread, memory)

    inside = next((ranks for ranks in range(1, yours.per_node + 1) if at(ranks)), None)
    if inside is not None or yours.strategy.startswith("HYBRID"):
        return inside
    nodes = _first(lambda count: at(count * yours.per_node), _MOST_RANKS // yours.per_node)
    return nodes * yours.per_node if nodes else None


def largest_batch(case: MemoryCase, yours: TrainingSetup, memory: int) -> int | None:
    """Return the largest batch per rank with which the run fits; 0 for none, None when activations are unknown.

    Args:
        case: The model.
        yours: The run.
        memory: Of one GPU, in bytes.
    """
    if case.shape is None:
        return None

    def too_large(batch: int) -> bool:
        return not _fits(case, replace(yours, batch_size=batch), memory)

    first = _first(too_large, _LARGEST_BATCH)
    return _LARGEST_BATCH if first is None else first - 1


def _fits(case: MemoryCase, setup: TrainingSetup, memory: int) -> bool:
    return verdict_of(case.need(setup).gpu, memory) == "fits"


def _first(holds: Callable[[int], bool], limit: int) -> int | None:
    """Return the smallest number from 1 for which something holds that goes on holding; None up to a limit."""
    high = 1
    while not holds(high):
        if high >= limit:
            return None
        high = min(2 * high, limit)
    low = high // 2 + 1 if high > 1 else 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high
