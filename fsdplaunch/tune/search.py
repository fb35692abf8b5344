"""What a search knows: a row per candidate, and the comparisons of the best."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

from fsdplaunch.config.schema.config import Config
from fsdplaunch.display_text import size_words
from fsdplaunch.errors import LaunchError
from fsdplaunch.estimate.families import ActivationShape
from fsdplaunch.estimate.memory import CONTEXT, MemoryCase, TrainingSetup, split_into_units, training_setup
from fsdplaunch.estimate.model import TensorSize, describe, model_sizes
from fsdplaunch.probe.memory_plan import STATES
from fsdplaunch.tune.decide import Pair, Verdict, contenders, decide
from fsdplaunch.tune.space import Candidate, Space, identity
from fsdplaunch.tune.trial import Outcome

State = Literal[
    "waiting", "running", "measured", "slower", "as fast", "does not fit", "failed", "not run", "same run"
]


class SearchStopped(Exception):  # noqa: N818  (no error: what is known counts)
    """The user stopped the search."""


class CannotMeasureError(Exception):
    """No candidate can be measured, for a reason that the first one shows."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One candidate, and what is known of it.

    Attributes:
        candidate: The changes.
        state: Where it stands.
        reason: Why it was not run, failed, or does not fit.
        outcomes: Of its launches, oldest first.
        predicted: Bytes per rank that were expected before it was run; None where nothing was.
    """

    candidate: Candidate
    state: State = "waiting"
    reason: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    predicted: int | None = None

    @property
    def fastest(self) -> Outcome | None:
        """Return the launch with the fastest median, which other processes disturbed least; None without one."""
        return min((one for one in self.outcomes if not one.failure), key=lambda one: one.median, default=None)

    @property
    def most_steps(self) -> int:
        """Return the steps of its longest measurement."""
        return max((len(one.seconds) for one in self.outcomes), default=0)

    @property
    def fits(self) -> bool:
        """Return whether it was measured and needs no more memory than it may."""
        states = ("measured", "slower", "as fast", "running")
        return self.state in states and self.fastest is not None and not self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """Two candidates, measured in turn.

    Attributes:
        first: The faster one so far.
        second: The other.
        rounds: What each round measured.
        verdict: What came of it; `open` when it was stopped before.
    """

    first: Candidate
    second: Candidate
    rounds: Sequence[Pair]
    verdict: Verdict

    @property
    def kept(self) -> Candidate:
        """Return the one to take: the faster, or of equal ones the one with fewer changes."""
        if self.verdict == "equal":
            return min(self.first, self.second, key=lambda candidate: len(candidate.changes))
        return self.second if self.verdict == "second" else self.first


_SLACK = 1.1
"""How far above the limit a prediction with activations must be before a candidate is not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What was found out about the model.

    Attributes:
        case: Its tensors, and its activations where they are known.
        optimizer: A key of STATES.
        batch: Rows and tokens per row; (1, 1) where no loader told.
        start: Bytes a rank has before anything is trained.
    """

    case: MemoryCase
    optimizer: str
    batch: tuple[int, int]
    start: int


@dataclass(slots=True, kw_only=True)
class Predictor:
    """Predicts memory.

    Attributes:
        world: Workers, all on this node.
        on_gpu: Whether they compute on GPUs.
        limit: Bytes that a rank may need; None where nothing limits it.
    """

    world: int
    on_gpu: bool
    limit: int | None
    _model: _Model | None = None
    _beside: dict[tuple[bool, int], int] = field(default_factory=dict)

    def learn(self, config: Config, outcome: Outcome) -> None:
        """Take what a measured run shows: the model, and what it needed beside what is calculated."""
        if self._model is None and outcome.model:
            self._model = _model_of(outcome.model, outcome.start)
        static = self._calculated(config)
        if static is not None:
            self._beside.setdefault(_kind(config), outcome.memory - static)

    def predict(self, config: Config) -> int | None:
        """Return the bytes that a rank of this configuration will need; None where that cannot be said."""
        static = self._calculated(config)
        if static is None or self._model is None:
            return None
        if self._model.case.shape is not None:
            # Activations are in the arithmetic: what is beside it, such as imports, is the same for all.
            return static + next(iter(self._beside.values()), self._model.start)
        beside = self._beside.get(_kind(config))
        return None if beside is None else max(0, static + beside)

    def refusal(self, config: Config) -> str:
        """Return why a configuration cannot fit, with the number; "" where it may."""
        blocks = self._model.case.sizes.depth if self._model is not None else 0
        if 0 < blocks < config.sharding.checkpoint_every:
            return f"the model has {blocks} block{'s' if blocks > 1 else ''}"
        static, predicted = self._calculated(config), self.predict(config)
        if self.limit is None or static is None or self._model is None:
            return ""
        extra = CONTEXT if self.on_gpu else 0
        least = static + extra + self._model.start if self._model.case.shape is None else 0
        likely = (predicted or 0) + extra
        if least <= self.limit and likely <= _SLACK * self.limit:
            return ""
        return f"needs {size_words(max(least, likely))} by estimate, {size_words(self.limit)} allowed"

    def units(self, config: Config) -> Any:
        """Return what the wrap policy makes of the model, equal where two make the same; None where not known."""
        policy = config.fsdp_config.fsdp_auto_wrap_policy
        if self._model is None or policy == "TRANSFORMER_BASED_WRAP":
            return None if self._model is None else policy
        setup = self._setup(config)
        if setup is None:
            return None
        return tuple(sorted(unit.name for unit in split_into_units(self._model.case.sizes, setup)[1]))

    def _calculated(self, config: Config) -> int | None:
        """Return what the arithmetic says of one rank, without what the process has at its start."""
        setup = self._setup(config)
        if setup is None or self._model is None:
            return None
        need = self._model.case.need
        total = need(setup).total
        if setup.checkpointing and (every := config.sharding.checkpoint_every) > 1:
            kept = need(replace(setup, checkpointing=False)).total  # the others keep their activations
            total += (kept - total) * (every - 1) // every
        return total

    def _setup(self, config: Config) -> TrainingSetup | None:
        if self._model is None:
            return None
        rows, length = self._model.batch
        try:
            return training_setup(
                config, world=self.world, per_node=self.world, batch_size=rows, length=length,
                optimizer=self._model.optimizer, on_gpu=self.on_gpu,
            )  # fmt: skip
        except LaunchError:
            return None


def _kind(config: Config) -> tuple[bool, int]:
    fsdp = config.fsdp_config
    return fsdp.fsdp_activation_checkpointing, config.sharding.checkpoint_every


def _model_of(found: Mapping[str, Any], start: int) -> _Model | None:
    """Return the model as a worker described it; None where its optimizer or its tensors are not known."""
    tensors = {name: TensorSize(tuple(shape), width) for name, (shape, width) in found["tensors"].items()}
    if found["optimizer"] not in STATES or not tensors:
        return None
    sizes = model_sizes(tensors, "the running script")
    batch = tuple(found["batch"] or (1, 1))
    shape = _activations(found["config"], sizes.parameters) if found["batch"] else None
    case = MemoryCase(sizes=sizes, shape=shape)
    return _Model(case=case, optimizer=found["optimizer"], batch=(batch[0], batch[1]), start=start)


def _activations(config: Mapping[str, Any] | None, parameters: int) -> ActivationShape | None:
    """Return what the activations of a transformers model depend on; None for others."""
    if config is None:
        return None
    try:
        described = describe(config, source="the running script")
    except LaunchError:
        return None
    return described.shape if described.sizes.parameters == parameters else None


Trial = Callable[[Candidate, int], Outcome]
"""Runs a candidate for so many measured steps."""
_RUNGS = 2
"""How often the steps are doubled for those that are left, before the two best meet."""
_GAIN = 0.98
"""A change whose step is below this share of yours, and below most of your steps, is tried with others."""
_MOST_TOGETHER = 6
"""Combinations that are tried at a time."""
_TIMES = 3
"""How often the best is combined with one more change."""


@dataclass(slots=True, kw_only=True)
class Search:
    """One search.

    Attributes:
        space: What may be tried.
        trial: Runs a candidate.
        predictor: Says what cannot fit.
        steps: Measured steps of a first launch.
        changed: Called whenever a row has changed.
        rows: Every candidate, in the order in which they came up.
        duels: The last comparisons.
    """

    space: Space
    trial: Trial
    predictor: Predictor
    steps: int
    changed: Callable[[], None] = lambda: None
    rows: dict[Candidate, Row] = field(default_factory=dict)
    duels: list[Duel] = field(default_factory=list)
    _seen: dict[object, Candidate] = field(default_factory=dict)
    _singles: list[Candidate] = field(default_factory=list)

    def run(self) -> Candidate | None:
        """Search to the end and return the candidate to take; None when none fits.

        Raises:
            SearchStopped: The user stopped it; rows and duels hold what is known.
            CannotMeasureError: The first candidate shows that none can be measured.
        """
        self._singles = self.space.singles()
        self._try_all([Candidate(), *self._singles])
        self._combine()
        return self._choose_fastest()

    def best(self) -> Candidate | None:
        """Return the fastest candidate that fits, by what is known now."""
        running = contenders(self._fitting())
        return running[0] if running else None

    def _fitting(self) -> dict[Candidate, Outcome]:
        return {each: row.fastest for each, row in self.rows.items() if row.fits and row.fastest is not None}

    def _try_all(self, candidates: Iterable[Candidate]) -> None:
        """Measure new candidates, then those again that may be the fastest, half of them at a time."""
        new = [candidate for candidate in candidates if candidate not in self.rows]
        for candidate in new:
            self.rows[candidate] = Row(candidate=candidate)
        self.changed()
        for candidate in new:
            self._try(self.rows[candidate])
        steps = self.steps
        for _ in range(_RUNGS):
            running = contenders(self._fitting())
            if len(running) <= 2:  # noqa: PLR2004  (the two that meet)
                break
            steps *= 2
            for candidate in running[: max(2, (len(running) + 1) // 2)]:
                if self.rows[candidate].most_steps < steps:
                    self._measure(self.rows[candidate], steps)
        self._mark_slower()

    def _mark_slower(self) -> None:
        running = set(contenders(self._fitting()))
        for candidate in self._fitting():
            self.rows[candidate].state = "measured" if candidate in running else "slower"
        self.changed()

    def _try(self, row: Row) -> None:
        """Measure a candidate for the first time, unless it is a run that is known or cannot fit."""
        config = self.space.config(row.candidate)
        if config is None:
            row.state, row.reason = "not run", "the rules refuse it"
            return
        key = identity(config, self.space.world, self.predictor.units(config))
        twin = self._seen.setdefault(key, row.candidate)
        row.predicted = self.predictor.predict(config)
        if twin != row.candidate:
            row.state, row.reason = "same run", f"the same run as {twin.label}"
        elif refusal := self.predictor.refusal(config):
            row.state, row.reason = "not run", refusal
        else:
            self._measure(row, self.steps)
            fastest = row.fastest
            if fastest is not None:
                self.predictor.learn(config, fastest)
        self.changed()

    def _measure(self, row: Row, steps: int) -> Outcome:
        before, row.state = row.state, "running"
        self.changed()
        try:
            outcome = self.trial(row.candidate, steps)
        except SearchStopped:
            row.state = before
            raise
        row.outcomes.append(outcome)
        limit = self.predictor.limit
        if outcome.failure:
            row.state, row.reason = "failed", outcome.failure
        elif limit is not None and outcome.memory > limit:
            row.state, row.reason = "does not fit", f"{size_words(outcome.memory)} of {size_words(limit)}"
        else:
            row.state = "measured"
        self.changed()
        alone = row.candidate.is_yours and len(row.outcomes) == 1
        if alone and outcome.kind in ("write", "error"):
            raise CannotMeasureError(outcome.failure)
        return outcome

    def _combine(self) -> None:
        """Add one more helpful change to the best candidate, as long as that helps."""
        if self.best() is None:
            self._find_any()
        for _ in range(_TIMES):
            base = self.best()
            if base is None:
                return
            helpers = [single for single in self._singles if self._may_help(single, base)]
            together = [base.with_changes(single) for single in helpers]
            new = [each for each in dict.fromkeys(together) if each not in self.rows]
            self._try_all(self._valid(new)[:_MOST_TOGETHER])
            if self.best() == base:
                return

    def _find_any(self) -> None:
        """Look for a candidate that fits: two changes together, then what is only done for want of memory."""
        alive = [each for each in self._singles if self.rows[each].state != "same run"]
        pairs = [first.with_changes(second) for first, second in combinations(alive, 2)]
        self._try_all(self._valid(dict.fromkeys(pairs))[: 2 * _MOST_TOGETHER])
        if self.best() is None:
            last = self.space.last_resorts()
            more = [each.with_changes(single) for each in last for single in alive]
            self._try_all(self._valid(dict.fromkeys([*last, *more]))[:_MOST_TOGETHER])

    def _valid(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        return [each for each in candidates if each not in self.rows and self.space.config(each) is not None]

    def _may_help(self, single: Candidate, base: Candidate) -> bool:
        """Return whether a change of another key gained by itself; where yours does not fit, whether it may."""
        taken = {path for path, _ in base.changes}
        row, yours = self.rows[single], self.rows[Candidate()]
        if taken & {path for path, _ in single.changes} or row.state == "same run":
            return False
        if not yours.fits or yours.fastest is None:
            return row.state != "failed" or bool(row.outcomes and row.outcomes[-1].kind == "memory")
        least = min(_GAIN * yours.fastest.median, yours.fastest.quartiles[0])
        return row.fits and row.fastest is not None and row.fastest.median < least

    def _choose_fastest(self) -> Candidate | None:
        """Let the two best meet, and then the better one and yours: what is proposed must be faster than that."""
        measured = self._fitting()
        ordered = sorted(measured, key=lambda candidate: measured[candidate].median)
        if len(ordered) < 2:  # noqa: PLR2004
            return ordered[0] if ordered else None
        best = ordered[0]
        for rival in self._rivals(ordered, near=Candidate() in contenders(measured)):
            best = self._meet(best, rival)
            if best.is_yours:
                break
        return best

    def _rivals(self, ordered: Sequence[Candidate], *, near: bool) -> list[Candidate]:
        """Return whom the best must meet: the runner-up, and yours; that first where it may be as fast."""
        best, runner_up, yours = ordered[0], ordered[1], Candidate()
        if best.is_yours or runner_up.is_yours or yours not in ordered:
            return [runner_up]
        return [yours, runner_up] if near else [runner_up, yours]

    def _meet(self, first: Candidate, second: Candidate) -> Candidate:
        """Measure two candidates in turn until it is clear which is faster, or that neither is."""
        rows = self.rows[first], self.rows[second]
        measured = self._fitting()
        before = measured[first], measured[second]
        rounds: list[Pair] = []
        verdict: Verdict = "open"
        place = len(self.duels)
        while verdict == "open":
            self.duels[place:] = [Duel(first=first, second=second, rounds=tuple(rounds), verdict="open")]
            order = rows if len(rounds) % 2 == 0 else rows[::-1]
            for row in order:
                if self._measure(row, self.steps).failure:
                    return self._without(row, *rows)
            pair = rows[0].outcomes[-1], rows[1].outcomes[-1]
            rounds.append(pair)
            verdict = decide(rounds, before)
        duel = Duel(first=first, second=second, rounds=tuple(rounds), verdict=verdict)
        self.duels[place:] = [duel]
        other = second if duel.kept == first else first
        self.rows[other].state = "as fast" if verdict == "equal" else "slower"
        self.rows[duel.kept].state = "measured"
        self.changed()
        return duel.kept

    def _without(self, failed: Row, first: Row, second: Row) -> Candidate:
        """Return the other one when one of the two failed at last."""
        return (second if failed is first else first).candidate
