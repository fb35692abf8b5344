"""Tell rounding that grows from another computation: by how far one process is carried by its last digits."""

import math
from itertools import accumulate

from fsdplaunch.launch.comparison.causes import Cause
from fsdplaunch.launch.comparison.records import RunFacts
from fsdplaunch.launch.comparison.verdict import Difference, Verdict, distances

_FACTOR = 10.0
"""Workers round at each step, in sums of other orders; the changed weights were rounded once."""
_FLOOR = 4e-6
"""Some thirty times the rounding of fp32: below it no difference is asked for its cause."""
_ID = "rounding"
_OPEN = ("told", "randomness", "batch-norm", "gradients", "unequal-means")


def is_equal(verdict: Verdict, cause: Cause | None) -> bool:
    """Return whether two runs compute the same, but for rounding where that is the cause.

    Args:
        verdict: Of comparing them.
        cause: Where they part.
    """
    return verdict.first is None or (cause is not None and cause.id == _ID)


def may_be_rounding(first: Difference, cause: Cause) -> bool:
    """Return whether a difference is one that rounding can make, and its cause one without proof.

    Args:
        first: Where the runs part.
        cause: That fits it best.
    """
    return cause.id in _OPEN and first.step != 0 and math.isfinite(first.by)


def rounding(first: Difference, plain: RunFacts, sharded: RunFacts, changed: RunFacts) -> Cause | None:
    """Return rounding as the cause where one process, changed in its last digits, goes as far from itself.

    It must have gone as far at every step until the runs part, not only there: something else that is computed
    over workers shows in full at the step that it is in, and rounding grows from nothing.

    Args:
        first: Where the runs part.
        plain: Of one process.
        sharded: Of the workers.
        changed: Of one process that began with weights changed in their last digits.
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
        text="rounding, which grows in this script: one process whose weights are changed in their last digits"
        f" before the first step is {reach[-1]:.1e} away from itself there",
        hint="compare in fp64 to see it shrink (torch.set_default_dtype(torch.float64)), or fewer --steps",
    )
