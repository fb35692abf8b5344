"""Draw by Python's `random.choices` for the rows of the global batch and keep this rank's, where it is kept."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.patch import replaced
from fsdplaunch.runtime.auto.rng.own_rows import own_rows


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

    with replaced(random, "choices", make):
        yield
