"""Everything an estimate says, as plain values: computed once, then shown as text, as JSON or as a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdplaunch.estimate.advice import SetupChange, changes, fewest_ranks, largest_batch
from fsdplaunch.estimate.memory import MOMENTS, PARTS, MemoryCase, MemoryNeed, Verdict, verdict_of
from fsdplaunch.estimate.report_notes import own_notes
from fsdplaunch.estimate.trace_client import StepTrace
from fsdplaunch.estimate.training_setup import TrainingSetup, alternatives


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
    def longest(self) -> int:
        """Return the bytes that the longest bar stands for: the most any way needs, or the memory there is."""
        return max([row.need.gpu for row in self.rows] + [self.memory or 0]) or 1

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
        "course": [list(point) for point in trace.course],
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


def moment_words(need: MemoryNeed) -> str:
    """Return when most is needed, in words."""
    return MOMENTS[need.moment]


def shares(parts: Mapping[str, int], context: int) -> list[tuple[str, int]]:
    """Return parts in the order they are shown, without empty ones; the context last."""
    return [(name, parts[name]) for name in PARTS if parts.get(name)] + ([("context", context)] if context else [])
