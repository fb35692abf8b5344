"""Draw from one table of weights for the rows of the global batch and keep this rank's, as negative samples are.

Needed because how many are drawn is no size of a tensor: `torch.multinomial(weights, n * 5, replacement=True)`,
and the `sample((n, 5))` of torch.distributions' categories, which comes down to it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.row_order import tell_once
from fsdplaunch.runtime.auto.rng.drawing_code import sizes_of_distributions
from fsdplaunch.runtime.auto.rng.own_rows import own_part
from fsdplaunch.runtime.patch import replaced

_UNREPEATED = (
    "numbers are drawn for the batch's rows without replacement: each rank draws those of its own rows among"
    " themselves"
)


@contextmanager
def drawing_from_tables(hook_context: HookContext, rows_first: Callable[[Any], bool]) -> Iterator[None]:
    """Draw as one process does, with replacement; tell where there is none.

    Args:
        hook_context: This worker's.
        rows_first: Tells whether a size is that of one value, or several, per row of this rank's batch.
    """

    def make(original: Any) -> Any:
        @wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            table, count = (kwargs.get("input", (*args, None)[0]), kwargs.get("num_samples", (*args, 0, 0)[1]))
            inner, asked = sizes_of_distributions() or ((count,), (count,))
            if not _is_one(table) or not isinstance(count, int) or not rows_first(asked):
                return original(*args, **kwargs)
            if not kwargs.get("replacement", (*args, False, False, False)[2]):
                tell_once(hook_context, "unrepeated", _UNREPEATED)
                return original(*args, **kwargs)
            if "num_samples" in kwargs:
                kwargs["num_samples"] = count * hook_context.data.size
            else:
                args = (args[0], count * hook_context.data.size, *args[2:])
            return own_part(hook_context, original(*args, **kwargs), table.dim() - 1, _parts(inner, asked))

        return draw

    with ExitStack() as stack:
        for owner in (torch, torch.Tensor):
            stack.enter_context(replaced(owner, "multinomial", make))
        yield


def _is_one(table: Any) -> bool:
    return type(table) is torch.Tensor and (table.dim() == 1 or table.size(0) == 1)


def _parts(inner: tuple[int, ...], asked: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many of the numbers each share has, where a distribution asks another for several shares."""
    each = math.prod(asked)
    return (each,) * (math.prod(inner) // each) if each else ()
