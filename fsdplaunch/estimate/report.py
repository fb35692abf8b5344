"""What an estimate answers: whether it fits, what to change and what that saves, fewest ranks, largest batch."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from fsdplaunch.display_text import GIB, counted
from fsdplaunch.estimate.memory import (
    CONTEXT,
    MOMENTS,
    PARTS,
    MemoryNeed,
    TrainingSetup,
    Verdict,
    alternatives,
    memory_need,
    verdict_of,
)
from fsdplaunch.estimate.model import Model

_MOST_RANKS = 65_536
_LARGEST_BATCH = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupChange:
    """One change to a run: what it is, how to make it, what it costs, the bytes per GPU it saves, what is left."""

    what: str
    option: str
    cost: str
    saves: int
    need: MemoryNeed


def changes(model: Model, yours: TrainingSetup) -> list[SetupChange]:
    """Return the single changes to a run that save memory on the GPU, the largest saving first."""
    now, found = memory_need(model, yours).gpu, []
    for what, option, cost, setup in _candidates(model, yours):
        need = memory_need(model, setup)
        if need.gpu < now:
            found.append(SetupChange(what=what, option=option, cost=cost, saves=now - need.gpu, need=need))
    return sorted(found, key=lambda change: -change.saves)


def _candidates(model: Model, yours: TrainingSetup) -> Iterator[tuple[str, str, str, TrainingSetup]]:
    if model.shape is not None and yours.checkpoint_every != 1:
        what, option = "activation checkpointing", "fsdp_activation_checkpointing=true"
        cost = "about 30 % more time: every block's forward runs twice"
        if yours.checkpoint_every:
            what, option = "checkpointing of every block", "sharding.checkpoint_every=1"
            cost = "every block's forward runs twice"
        yield what, option, cost, replace(yours, checkpoint_every=1)
    if yours.keeps:
        option = "fsdp_reshard_after_forward=true" if yours.version != 1 else "fsdp_sharding_strategy=FULL_SHARD"
        strategy = yours.strategy.replace("SHARD_GRAD_OP", "FULL_SHARD")
        freed = replace(yours, keeps=0, strategy=strategy)
        yield "free gathered parameters after forward", option, "one more gather per block and step", freed
    if yours.shards < yours.spread:
        what, option = f"shard over all {yours.spread} ranks", "fsdp_sharding_strategy=FULL_SHARD"
        cost = "gathers cross nodes" if yours.world > yours.per_node else "gathers in forward and backward"
        yield what, option, cost, replace(yours, shards=yours.spread, strategy="FULL_SHARD", keeps=0)
    if yours.widths(model.sizes)[1] > 2:  # noqa: PLR2004
        low = replace(yours, compute=2, reduce=4, master=4)
        yield "compute in bf16", "mixed_precision=bf16", "rounding; faster on GPUs that have it", low
    if not yours.offload and yours.on_gpu:
        cost = "every step copies parameters and gradients over PCIe; the optimizer runs on the CPU"
        yield "offload to host memory", "fsdp_offload_params=true", cost, replace(yours, offload=True)
    if yours.batch_size > 1 and model.shape is not None:
        half = yours.batch_size // 2
        what, option = f"batch of {half} instead of {yours.batch_size}", f"a batch of {half} in the script"
        cost = "more accumulation steps for the same global batch"
        yield what, option, cost, replace(yours, batch_size=half)
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


def fewest_ranks(model: Model, yours: TrainingSetup, memory: int) -> int | None:
    """Return the smallest number of ranks with which a GPU's bytes are enough, or None when no number is.

    Ranks beyond one node come in whole nodes. Strategy and batch per rank stay.
    """
    if yours.strategy == "NO_SHARD":
        return 1 if _fits(model, yours, memory) else None
    single = replace(yours, shards=1, world=1)  # one replica; more replicas change nothing per rank

    def at(ranks: int) -> bool:
        if ranks % (yours.tensor * yours.context):
            return False
        spread = replace(single, world=ranks, shards=ranks // yours.tensor, per_node=min(ranks, yours.per_node))
        return _fits(model, spread, memory)

    inside = next((ranks for ranks in range(1, yours.per_node + 1) if at(ranks)), None)
    if inside is not None or yours.strategy.startswith("HYBRID"):
        return inside
    nodes = _first(lambda count: at(count * yours.per_node), _MOST_RANKS // yours.per_node)
    return nodes * yours.per_node if nodes else None


def largest_batch(model: Model, yours: TrainingSetup, memory: int) -> int | None:
    """Return the largest batch per rank with which the run fits; 0 for none, None when activations are unknown."""
    if model.shape is None:
        return None
    first = _first(lambda batch: not _fits(model, replace(yours, batch_size=batch), memory), _LARGEST_BATCH)
    return _LARGEST_BATCH if first is None else first - 1


def _fits(model: Model, setup: TrainingSetup, memory: int) -> bool:
    return verdict_of(memory_need(model, setup).gpu, memory) == "fits"


def _first(holds: Callable[[int], bool], limit: int) -> int | None:
    """Return the smallest number from 1 for which something holds that goes on holding; None up to a limit."""
    place = bisect_left(range(1, limit + 1), True, key=holds)
    return place + 1 if place < limit else None


def _notes(model: Model, need: MemoryNeed, host_memory: int | None) -> Iterator[str]:
    setup, shape = need.setup, model.shape
    if need.context:
        yield f"{CONTEXT / GIB:.2f} GiB of each GPU are an assumption: the CUDA context, cuBLAS and NCCL"
    whole = 'the whole model on each rank (with torch.device("meta") and fsdplaunch.prepare none does)'
    amounts = (need.host_per_node, "training"), (need.loading, "loading the weights"), (need.building, whole)
    for amount, what in amounts:
        if host_memory is not None and amount > host_memory:
            there = f"this one has {host_memory / GIB:.0f}"
            yield f"{what} needs {amount / GIB:.0f} GiB of host memory per node, {there}"
    rows = max((unit.rows for unit in (model.sizes.root, *model.sizes.blocks)), default=1)
    if setup.shards > rows and setup.version != 1:
        yield f"no tensor has {setup.shards} rows: some ranks hold nothing"
    if shape is None:
        yield "activations are not counted: there is no config.json of a known model type"
    elif 0 < shape.max_length < setup.length:
        yield f"sequences of {setup.length} are longer than the model's {shape.max_length}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """An estimate."""

    title: str  # model and configuration, in words
    words: str  # parameters, blocks and where they were counted, in words
    model: Model  # the model
    setup: TrainingSetup  # the run as configured
    memory: int | None = None  # of one GPU, in bytes; None when it is not known
    memory_from: str = ""  # where that number comes from
    host_memory: int | None = None  # of this machine, in bytes; None when unknown or when the run is elsewhere
    said_first: Sequence[str] = ()  # notes

    @cached_property
    def needs(self) -> Sequence[MemoryNeed]:
        """Return what each way to shard needs, the configured one first."""
        return [memory_need(self.model, setup) for setup in (self.setup, *alternatives(self.setup))]

    @property
    def verdict(self) -> Verdict:
        """Return whether the configured run fits."""
        return verdict_of(self.needs[0].gpu, self.memory)

    @property
    def fewest(self) -> int | None:
        """Return the smallest number of ranks that fits; None when none does or memory is unknown."""
        return fewest_ranks(self.model, self.setup, self.memory) if self.memory else None

    @property
    def batch(self) -> int | None:
        """Return the largest batch per rank that fits; None when it is not known."""
        return largest_batch(self.model, self.setup, self.memory) if self.memory else None

    def notes(self) -> list[str]:
        """Return what should be known about the numbers."""
        return [*self.said_first, *_notes(self.model, self.needs[0], self.host_memory)]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, all sizes in bytes; a strategy's `parts` and `context` sum to `gpu`."""
        sizes = self.model.sizes
        strategies = [
            {
                "name": name_of(need.setup),
                "verdict": verdict_of(need.gpu, self.memory),
                "gpu": need.gpu,
                "allocated": need.total,
                "parts": dict(need.parts),
                "context": need.context,
                "moment": need.moment,
                "moments": {name: sum(parts.values()) for name, parts in need.moments.items()},
                "host_per_node": need.host_per_node,
                "loading_per_node": need.loading,
                "building_per_node": need.building,
                "checkpoint": need.checkpoint,
                "yours": not at,
            }
            for at, need in enumerate(self.needs)
        ]
        found = [
            {
                "what": change.what,
                "option": change.option,
                "cost": change.cost,
                "saves": change.saves,
                "gpu": change.need.gpu,
                "verdict": verdict_of(change.need.gpu, self.memory),
            }
            for change in changes(self.model, self.setup)
        ]
        model = {"source": sizes.source, "parameters": sizes.parameters}
        return {
            "model": model | {"blocks": sizes.depth, "bytes": sizes.stored},
            "setup": asdict(self.setup),
            "gpu_memory": self.memory,
            "verdict": self.verdict,
            "fewest_ranks": self.fewest,
            "largest_batch": self.batch,
            "strategies": strategies,
            "changes": found,
            "notes": self.notes(),
        }


def name_of(setup: TrainingSetup) -> str:
    """Return a way to shard in a few words: `HYBRID_SHARD 2 x 8, offload`."""
    layout = f" {setup.replicas} x {setup.shards}" if setup.replicas > 1 and setup.shards > 1 else ""
    layout += f", layers over {setup.tensor}" if setup.tensor > 1 else ""
    layout += f", sequences over {setup.context}" if setup.context > 1 else ""
    return f"{setup.strategy}{layout}{', offload' if setup.offload else ''}"


_HEADS = ("params", "grads", "optim", "gathered", "comm", "activ", "temp", "context")
_MOST_CHANGES = 5


def text_report(report: Report) -> Iterator[str]:
    """Yield the whole report as lines."""
    yield from (report.title, report.words, "")
    head = "GiB per GPU, at the peak"
    names = [name_of(need.setup) + ("" if at else " (yours)") for at, need in enumerate(report.needs)]
    wide = max(len(head), *map(len, names))
    yield f"{head:<{wide}}" + "".join(f"{each:>9}" for each in _HEADS) + f"{'total':>8}"
    for name, need in zip(names, report.needs, strict=True):
        cells = "".join(f"{_gib(amount):>9}" for amount in (*(need.parts[part] for part in PARTS), need.context))
        host = f"{need.host_per_node / GIB:.0f} GiB of host memory" if need.host else ""
        verdict = verdict_of(need.gpu, report.memory).replace("unknown", "")
        yield f"{name:<{wide}}{cells}{_gib(need.gpu):>8}  {', '.join(filter(None, (verdict, host)))}"
    yield ""
    yield from _answers(report)
    if saving := changes(report.model, report.setup)[:_MOST_CHANGES]:
        yield from ("", "to change                                    saves   then    cost")
        for change in saving:
            fits = verdict_of(change.need.gpu, report.memory)
            then = f"{change.need.gpu / GIB:6.1f}" + (f" ({fits})" if fits != "unknown" else "")
            yield f"{change.what:<41} {-change.saves / GIB:+8.1f} {then}   {change.cost}"
            yield f"    {change.option}"
    if notes := report.notes():
        yield from ("", *(f"note: {note}" for note in notes))


def _gib(amount: int) -> str:
    return f"{amount / GIB:.1f}" if amount >= GIB / 20 or not amount else "<0.1"


def _answers(report: Report) -> Iterator[str]:
    need, setup, memory = report.needs[0], report.setup, report.memory
    tokens = f"{setup.length} tokens per rank"
    if memory is None:
        yield "fits?           the GPU's memory is not known here: pass --gpu-memory, for example 80GB"
    else:
        spare = (memory - need.gpu) / GIB
        words = f"{spare:.1f} GiB to spare" if spare >= 0 else f"{-spare:.1f} GiB too much"
        amounts = f"{need.gpu / GIB:.1f} of {memory / GIB:.1f} GiB per GPU"
        yield f"{report.verdict:<15} {amounts} ({report.memory_from}), {words}"
    yield f"peak            {MOMENTS[need.moment]}"
    if memory is not None:
        fewest = counted(report.fewest, "rank") if report.fewest else "no number of ranks is enough"
        yield f"smallest world  {fewest}, at a batch of {setup.batch_size} x {tokens}"
        if report.batch is not None:
            batch = f"{report.batch} x {tokens}" if report.batch else "not even 1"
            yield f"largest batch   {batch}, with {counted(setup.world, 'rank')}"
    alone = f"{need.building / GIB:.1f} where each rank builds the whole model itself"
    yield f"host memory     {need.loading / GIB:.1f} GiB per node while loading; {alone}"
    if need.host:
        kinds = (("offloaded state", setup.offload), ("the copy of an async save", setup.async_save))
        what = " and ".join(name for name, is_there in kinds if is_there)
        yield f"                {need.host_per_node / GIB:.1f} GiB per node while training: {what}"
    yield f"checkpoint      {need.checkpoint / GIB:.1f} GiB, optimizer included"
