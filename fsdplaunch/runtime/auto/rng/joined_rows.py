"""Note where a script puts shares of the batch below each other, such as two views, for what is drawn for them.

Needed because one process has all rows of the first view before those of the second: this rank's rows of what is
drawn are some of each.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from fsdplaunch.runtime.auto.data.local_batches import LocalBatches
from fsdplaunch.runtime.auto.patch import replaced

_JOINING = ("cat", "concat", "concatenate", "vstack")


@contextmanager
def joining_rows(batches: LocalBatches) -> Iterator[None]:
    """Look at what joins tensors and repeats them."""
    joins = _Joins(batches)
    with ExitStack() as stack:
        for name in _JOINING:
            stack.enter_context(replaced(torch, name, joins.joining))
        stack.enter_context(replaced(torch.Tensor, "repeat", joins.repeating))
        yield


class _Joins:
    """Functions that note the shares that they join."""

    def __init__(self, batches: LocalBatches) -> None:
        self.batches = batches

    def joining(self, original: Any) -> Any:
        """Make `cat`, which puts shares below each other."""
        batches = self.batches

        @wraps(original)
        def join(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            along = args[0] if args else kwargs.get("dim", 0)
            if along == 0 and batches.sizes and isinstance(tensors, list | tuple):
                batches.join([len(each) if each.dim() else 0 for each in tensors])
            return original(tensors, *args, **kwargs)

        return join

    def repeating(self, original: Any) -> Any:
        """Make `repeat`, which puts a share below itself."""
        batches = self.batches

        @wraps(original)
        def repeat(tensor: torch.Tensor, *sizes: Any) -> torch.Tensor:
            times = sizes[0] if sizes and isinstance(sizes[0], tuple | list) else sizes
            if tensor.dim() and len(times) == tensor.dim() and batches.sizes and isinstance(times[0], int):
                batches.join([len(tensor)] * times[0])
            return original(tensor, *sizes)  # type: ignore[no-any-return]

        return repeat
