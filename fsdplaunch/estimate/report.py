"""What an estimate answers: whether it fits, what to change and what that saves, fewest ranks, largest batch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdplaunch.display_text import GIB
from fsdplaunch.estimate.memory import (
    CONTEXT,
    MOMENTS,
    PARTS,
    MemoryCase,
    MemoryNeed,
    TrainingSetup,
    Verdict,
    alternatives,
    divides_heads,
    verdict_of,
)
from fsdplaunch.estimate.trace_client import StepTrace

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
    return [*notes, *_indivisible(case, setup)]


def _indivisible(case: MemoryCase, setup: TrainingSetup) -> Iterator[str]:
    """Yield what ranks that split layers or sequences cannot divide."""
    if case.shape is None:
        return
    heads = case.shape.head_count
    if heads % setup.tensor:
        yield f"tp_size {setup.tensor} does not divide the model's {heads} heads: its attention cannot be split"
    if not divides_heads(case.shape, setup):
        yield (
            f"cp_size {setup.context} does not divide the model's {heads} heads: training would stop"
            " at its first step; set sharding.context_parallel_attention to auto or ring"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to shard.

    Attributes:
        name: In words.
        need: What it needs.
        verdict: Whether it fits.
        is_yours: Whether the configuration says so.
    """

    name: str
    need: MemoryNeed
    verdict: Verdict
    is_yours: bool

    @property
    def label(self) -> str:
        """Return the name as reports show it."""
        return f"{self.name} (yours)" if self.is_yours else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An estimate.

    Attributes:
        title: Model and configuration, in words.
        model: Parameters, blocks and where they were counted, in words.
        case: The model.
        setup: The run as configured.
        memory: Of one GPU, in bytes; None when it is not known.
        memory_from: Where that number comes from.
        host_memory: Of this machine, in bytes; None when unknown or when the run is elsewhere.
        rows: Yours first, then the others.
        changes: Single changes that save memory.
        fewest: Smallest number of ranks that fits; None when none does or memory is unknown.
        batch: Largest batch per rank that fits; None when it is not known.
        exact: The traced step, when one was traced.
        notes: What should be known about the numbers.
    """

    title: str
    model: str
    case: MemoryCase
    setup: TrainingSetup
    memory: int | None
    memory_from: str
    host_memory: int | None
    rows: Sequence[Row]
    changes: Sequence[SetupChange]
    fewest: int | None
    batch: int | None
    exact: StepTrace | None
    notes: Sequence[str]

    @property
    def yours(self) -> Row:
        """Return the row of the configuration."""
        return self.rows[0]

    @property
    def verdict(self) -> Verdict:
        """Tell whether the configured run fits; what was traced counts more than what was calculated."""
        if self.exact is None:
            return self.yours.verdict
        return verdict_of(self.exact.total + self.yours.need.context, self.memory)

    @property
    def gpu(self) -> int:
        """Return bytes of a GPU in use at the peak of the configured run."""
        return self.yours.need.gpu if self.exact is None else self.exact.total + self.yours.need.context

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, all sizes in bytes."""
        return {
            "model": {
                "source": self.case.sizes.source,
                "parameters": self.case.sizes.parameters,
                "blocks": self.case.sizes.depth,
                "bytes": self.case.sizes.stored,
            },
            "setup": {name: getattr(self.setup, name) for name in TrainingSetup.__dataclass_fields__},
            "gpu_memory": self.memory,
            "verdict": self.verdict,
            "fewest_ranks": self.fewest,
            "largest_batch": self.batch,
            "strategies": [row_data(row) for row in self.rows],
            "changes": [
                {
                    "what": change.what,
                    "option": change.option,
                    "cost": change.cost,
                    "saves": change.saves,
                    "gpu": change.need.gpu,
                    "verdict": verdict_of(change.need.gpu, self.memory),
                }
                for change in self.changes
            ],
            "exact": None if self.exact is None else exact_data(self.exact),
            "notes": list(self.notes),
        }


def row_data(row: Row) -> dict[str, Any]:
    """Return one way to shard as plain data; `parts` and `context` sum to `gpu`."""
    need = row.need
    return {
        "name": row.name,
        "yours": row.is_yours,
        "verdict": row.verdict,
        "gpu": need.gpu,
        "allocated": need.total,
        "parts": dict(need.parts),
        "context": need.context,
        "moment": need.moment,
        "moments": {name: sum(parts.values()) for name, parts in need.moments.items()},
        "host_per_node": need.host_per_node,
        "loading_per_node": need.loading,
        "checkpoint": need.checkpoint,
    }


def exact_data(trace: StepTrace) -> dict[str, Any]:
    """Return a traced step as plain data; `parts` sum to `allocated`."""
    return {
        "allocated": trace.total,
        "parts": dict(trace.parts),
        "host_per_rank": trace.host,
        "phase": trace.phase,
        "module": trace.module,
        "seconds": trace.seconds,
    }


def make_report(
    case: MemoryCase,
    setup: TrainingSetup,
    *,
    title: str,
    model: str,
    memory: int | None,
    memory_from: str = "",
    host_memory: int | None = None,
    exact: StepTrace | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Compute everything an estimate says.

    Args:
        case: The model.
        setup: The run as configured.
        title: Model and configuration, in words.
        model: The model, in words.
        memory: Of one GPU, in bytes; None when it is not known.
        memory_from: Where that number comes from.
        host_memory: Of this machine, in bytes.
        exact: A traced step of the configured run.
        notes: Said first.
    """
    setups = [setup, *alternatives(setup)]
    needs = [case.need(each) for each in setups]
    rows = [
        Row(
            name=name_of(need.setup),
            need=need,
            verdict=verdict_of(need.gpu, memory),
            is_yours=need.setup is setup,
        )
        for need in needs
    ]
    return Report(
        title=title,
        model=model,
        case=case,
        setup=setup,
        memory=memory,
        memory_from=memory_from,
        host_memory=host_memory,
        rows=rows,
        changes=changes(case, setup),
        fewest=fewest_ranks(case, setup, memory) if memory else None,
        batch=largest_batch(case, setup, memory) if memory else None,
        exact=exact,
        notes=[*notes, *own_notes(case, needs[0], host_memory)],
    )


def name_of(setup: TrainingSetup) -> str:
    """Return a way to shard in a few words: `HYBRID_SHARD 2 x 8, offload`."""
    layout = f" {setup.replicas} x {setup.shards}" if setup.replicas > 1 and setup.shards > 1 else ""
    layout += f", layers over {setup.tensor}" if setup.tensor > 1 else ""
    layout += f", sequences over {setup.context}" if setup.context > 1 else ""
    return f"{setup.strategy}{layout}{', offload' if setup.offload else ''}"


_HEADS = ("params", "grads", "optim", "gathered", "comm", "activ", "temp", "context")
_MOST_CHANGES = 5


def text_report(report: Report) -> list[str]:
    """Return the whole report as lines.

    Args:
        report: The estimate.
    """
    lines = [report.title, report.model, "", *_table(report)]
    if report.exact is not None:
        lines += ["", *_exact_lines(report)]
    lines += ["", *_answers(report)]
    if report.changes:
        lines += ["", "to change                                    saves   then    cost", *_change_lines(report)]
    return [*lines, *(["", *(f"note: {note}" for note in report.notes)] if report.notes else [])]


def _gib(amount: int) -> str:
    return f"{amount / GIB:.1f}" if amount >= GIB / 20 or not amount else "<0.1"


def _table(report: Report) -> Iterator[str]:
    names = [row.label for row in report.rows]
    wide = max(len("GiB per GPU, at the peak"), *map(len, names))
    yield f"{'GiB per GPU, at the peak':<{wide}}" + "".join(f"{head:>9}" for head in _HEADS) + f"{'total':>8}"
    for name, row in zip(names, report.rows, strict=True):
        parts = row.need.parts
        cells = "".join(f"{_gib(amount):>9}" for amount in (*(parts[part] for part in PARTS), row.need.context))
        yield f"{name:<{wide}}{cells}{_gib(row.need.gpu):>8}  {_verdict(row)}"


def _verdict(row: Row) -> str:
    host = f"{row.need.host_per_node / GIB:.0f} GiB of host memory" if row.need.host else ""
    words = [row.verdict if row.verdict != "unknown" else "", host]
    return ", ".join(word for word in words if word)


def _exact_lines(report: Report) -> Iterator[str]:
    trace = report.exact
    if trace is None:
        return
    calculated = report.yours.need.total
    where = f" of {trace.module}" if trace.module else ""
    yield (
        f"exact: {trace.total / GIB:.2f} GiB per GPU at the peak, in the {trace.phase}{where}; "
        f"the quick formula says {calculated / GIB:.2f} ({100 * (calculated / max(trace.total, 1) - 1):+.0f} %)"
    )
    parts = ", ".join(f"{name} {_gib(amount)}" for name, amount in trace.parts.items() if amount)
    yield f"       {parts}; traced in {trace.seconds:.0f} s"


def _answers(report: Report) -> Iterator[str]:
    need, setup = report.yours.need, report.setup
    if report.memory is None:
        yield "fits?           the GPU's memory is not known here: pass --gpu-memory, for example 80GB"
    else:
        spare = (report.memory - report.gpu) / GIB
        words = f"{spare:.1f} GiB to spare" if spare >= 0 else f"{-spare:.1f} GiB too much"
        yield (
            f"{report.verdict:<15} {report.gpu / GIB:.1f} of {report.memory / GIB:.1f} GiB per GPU"
            f" ({report.memory_from}), {words}"
        )
    yield f"peak            {MOMENTS[need.moment]}"
    if report.memory is not None:
        plural = "" if report.fewest == 1 else "s"
        fewest = f"{report.fewest} rank{plural}" if report.fewest else "no number of ranks is enough"
        yield f"smallest world  {fewest}, at a batch of {setup.batch_size} x {setup.length} tokens per rank"
        if report.batch is not None:
            batch = f"{report.batch} x {setup.length} tokens per rank" if report.batch else "not even 1"
            yield f"largest batch   {batch}, with {setup.world} ranks"
    loading, offloaded = need.loading / GIB, need.host_per_node / GIB
    yield f"host memory     {loading:.1f} GiB per node while loading, {offloaded:.1f} for offloaded state"
    yield f"checkpoint      {need.checkpoint / GIB:.1f} GiB, optimizer included"


def _change_lines(report: Report) -> Iterator[str]:
    for change in report.changes[:_MOST_CHANGES]:
        verdict = verdict_of(change.need.gpu, report.memory)
        then = f"{change.need.gpu / GIB:6.1f}" + (f" ({verdict})" if verdict != "unknown" else "")
        yield f"{change.what:<41} {-change.saves / GIB:+8.1f} {then}   {change.cost}"
        yield f"    {change.option}"
