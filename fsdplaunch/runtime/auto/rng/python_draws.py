"""Draw by Python's `random.choices` for the rows of the global batch and keep this rank's, where it is kept.

What draws a single number is counted: each rank draws that of its first rows, which is told.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.rng.own_rows import own_rows
from fsdplaunch.runtime.auto.rng.single_draws import count_single
from fsdplaunch.runtime.patch import replaced

_SINGLE = ("random", "uniform", "gauss", "normalvariate", "randint", "randrange", "choice", "betavariate")


@contextmanager
def drawing_by_python(hook_context: HookContext, rows_first: Callable[[Any], bool]) -> Iterator[None]:
    """Draw as one process does.

    Args:
        hook_context: This worker's.
        rows_first: Tells whether a size is that of one value, or several, per row of this rank's batch.
    """

    def make(original: Any) -> Any:
        @wraps(original)
        def choices(*args: Any, k: int = 1, **kwargs: Any) -> Any:
            if not isinstance(k, int) or k < 1 or not rows_first((k,)):
                return original(*args, k=k, **kwargs)
            drawn = original(*args, k=k * hook_context.data.size, **kwargs)
            own = own_rows(hook_context, hook_context.batches.parts_of(k))
            return drawn[own] if isinstance(own, slice) else [drawn[row] for row in own]

        return choices

    def counting(original: Any) -> Any:
        @wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            count_single(hook_context)
            return original(*args, **kwargs)

        return draw

    with ExitStack() as stack:
        stack.enter_context(replaced(random, "choices", make))
        for name in _SINGLE:
            stack.enter_context(replaced(random, name, counting))
        yield
