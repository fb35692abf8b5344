"""Which known cause fits a difference between two runs: the first whose evidence is in the records."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from fsdplaunch.comparison.verdict import Difference, RunFacts, StepFacts, Verdict, distances


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why two runs compute something else: a name for programs, what it is with the evidence, what to do."""

    id: str
    text: str
    hint: str


def find_cause(first: Difference, plain: RunFacts, sharded: RunFacts, dtype: str | None) -> Cause:
    """Return the cause that fits where two runs part; the last is one that cannot be excluded.

    The workers' parameters are in `dtype` in computation; None for their own.
    """
    if first.step == 0:
        return Cause(
            id="initial-weights",
            text="the two runs begin with different weights: the seed is new in every run, or the script resumes"
            " from what its first run saved",
            hint="set a fixed seed in the script (torch.manual_seed, numpy's and random's) before the model is"
            " built; have it save to a folder that it does not resume from",
        )
    at = min((first.step or len(sharded.steps)) or 1, len(plain.steps), len(sharded.steps))
    # A step that was equal, whatever was drawn in it, shows that draws make no difference.
    *before, drawn = [
        (one.draws or many.draws) and any(each != one.random[0] for each in many.random)
        for one, many in zip(plain.steps[:at], sharded.steps[:at], strict=True)
    ]
    one, many = plain.steps[at - 1], sharded.steps[at - 1]
    has_drawn = drawn and not any(before)
    if (of_rows := _other_rows(one, many, sharded, drawn=has_drawn)) is not None:
        return of_rows
    added = zip(one.losses, many.totals, strict=False)
    is_sum = len(many.rows) > 1 and one.losses and first.what == "loss"
    if is_sum and all(_close(loss, total) and abs(loss) > 0 for loss, total in added):
        return Cause(
            id="loss-is-a-sum",
            text=f"the loss at {one.line} is a sum over the batch: averaged over the workers, its gradients are"
            f" {len(many.rows)} times too small",
            hint='use the mean over the rows (reduction="mean"), or multiply the loss by the number of workers',
        )
    return next(_without_proof(first, one, sharded, dtype, drawn=has_drawn))


def _other_rows(one: StepFacts, many: StepFacts, sharded: RunFacts, *, drawn: bool) -> Cause | None:
    """Recognise workers that were given other rows together than the plain run, or as many each."""
    plain, rows = one.rows[0], sum(each or 0 for each in many.rows)
    if plain is None or None in many.rows or (plain in many.rows and len(set(many.rows)) > 1):
        return None
    if plain in many.rows:
        if all(_close(content, one.contents[0]) for content in many.contents):
            return _randomness(sharded) if drawn else None
        if all(_close(content, many.contents[0]) for content in many.contents):
            return _drawn_anew("all workers read the same rows, but not those of the run in one process")
        return Cause(
            id="batch-size",
            text=f"the global batch is {rows} rows instead of {plain}: each worker reads its own",
            hint=f"divide the script's batch size by {len(many.rows)} to compare, or accept the larger batch",
        )
    if rows != plain:
        return Cause(
            id="batch-size",
            text=f"the workers' batches have {rows} rows together, that of the run in one process has {plain}",
            hint="use a batch size that the workers can divide evenly",
        )
    same = _close(sum(many.contents), one.contents[0])
    return None if same else _drawn_anew("the workers read other rows than the run in one process")


def _drawn_anew(what: str) -> Cause:
    return Cause(
        id="other-data",
        text=f"{what}: the rows or their order are drawn anew in every run, or per rank",
        hint="seed what draws them (a sampler's generator, an environment) with a fixed number on all ranks",
    )


def _randomness(run: RunFacts) -> Cause:
    drops = [layer for layer in run.layers if "Dropout" in layer]
    named = f" ({drops[0]}{f' and {len(drops) - 1} more' if len(drops) > 1 else ''})" if drops else ""
    return Cause(
        id="randomness",
        text=f"the forward pass draws random numbers{named}, and workers draw other numbers than one process",
        hint="set dropout to 0 to compare; only the random numbers differ, not the computation",
    )


def _without_proof(
    first: Difference, one: StepFacts, run: RunFacts, dtype: str | None, *, drawn: bool
) -> Iterator[Cause]:
    """Yield what the records speak for and do not prove, the likeliest first."""
    if run.told:
        hint = "docs/limits.md says what it means and what can be done"
        yield Cause(id="told", text=f"a worker printed the reason: {run.told[0]}", hint=hint)
    if drawn:
        yield _randomness(run)
    if norms := [layer for layer in run.layers if "BatchNorm" in layer]:
        yield Cause(
            id="batch-norm",
            text=f"{norms[0]} normalises by each worker's own rows, as under DDP, not by the whole batch",
            hint="use GroupNorm, on GPUs SyncBatchNorm.convert_sync_batchnorm(model), or accept the difference",
        )
    if dtype not in (None, "fp32"):
        yield Cause(
            id="dtype",
            text=f"the workers compute in {dtype}, as configured, and the plain run in the model's own dtype",
            hint="compare with --set mixed_precision=no, or with a larger --tolerance",
        )
    if "gradient" in first.what:
        yield Cause(
            id="gradients",
            text="the losses are equal and the gradients are not: the script treats shards as full tensors, or"
            " computes gradients of gradients (create_graph)",
            hint="look at what the script does between backward and step, and report it with the tensor's name",
        )
    yield Cause(
        id="unequal-means",
        text="the records show none of the other causes; a loss that is a mean over unequal numbers of rows"
        f" or tokens (padding, ignored labels) does this: {one.line or 'the loss'}",
        hint="see docs/limits.md, what is different from one process",
    )


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)


_FACTOR = 10.0  # workers round at each step, in sums of other orders; the changed weights were rounded once
_FLOOR = 4e-6  # some thirty times the rounding of fp32: below it no difference is asked for its cause
_ID = "rounding"
_OPEN = ("told", "randomness", "batch-norm", "gradients", "unequal-means")


def is_equal(verdict: Verdict, cause: Cause | None) -> bool:
    """Return whether two runs compute the same, except for rounding where that is the cause."""
    return verdict.first is None or (cause is not None and cause.id == _ID)


def may_be_rounding(first: Difference, cause: Cause) -> bool:
    """Return whether a difference is one that rounding can make, and its cause one without proof."""
    return cause.id in _OPEN and first.step != 0 and math.isfinite(first.by)


def rounding(first: Difference, plain: RunFacts, sharded: RunFacts, changed: RunFacts) -> Cause | None:
    """Return rounding as the cause where one process, changed in its last digits, goes as far from itself.

    It must have gone as far at every step until the runs part, not only there: something else that is computed
    over workers shows in full at the step that it is in, and rounding grows from nothing.
    """
    theirs, own = distances(plain, sharded), distances(plain, changed)
    if len(plain.steps) > len(changed.steps):
        return None
    steps = first.step or len(plain.steps)
    reach = list(accumulate(own[:steps], max)) + ([own[-1]] if first.step is None else [])
    if not all(far <= max(_FLOOR, _FACTOR * by) for far, by in zip(theirs, reach, strict=False)):
        return None
    return Cause(
        id=_ID,
        text="rounding, which grows in this script: in one process, changing the last digits of the weights before"
        f" the first step makes a difference of {reach[-1]:.1e} there",
        hint="compare in fp64 to see it shrink (torch.set_default_dtype(torch.float64)), or fewer --steps",
    )
