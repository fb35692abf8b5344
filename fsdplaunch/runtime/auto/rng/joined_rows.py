"""Note where a script puts shares of the batch below each other, such as two views, for what is drawn for them.

Needed because one process has all rows of the first view before those of the second: this rank's rows of what is
drawn are some of each. Where several rows of one sample are side by side they are this rank's in a row.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.row_order import tell_once
from fsdplaunch.runtime.patch import replaced

_JOINING = ("cat", "concat", "concatenate", "vstack")
_RESHAPING = ("view", "reshape", "flatten")
_SHARES = (
    "random numbers were drawn for the rows of shares that are one below the other, and each rank has drawn those"
    " of rows that are not its own: draw them with the rows first, `(n, 5)`"
)


@contextmanager
def joining_rows(hook_context: HookContext) -> Iterator[None]:
    """Look at what joins tensors and repeats them."""
    joins = _Joins(hook_context)
    with ExitStack() as stack:
        for name in _JOINING:
            stack.enter_context(replaced(torch, name, joins.joining))
        for name in ("repeat", "tile"):
            stack.enter_context(replaced(torch.Tensor, name, joins.repeating))
        for owner in (torch, torch.Tensor):
            stack.enter_context(replaced(owner, "repeat_interleave", joins.interleaving))
            for name in _RESHAPING:
                if hasattr(owner, name):
                    stack.enter_context(replaced(owner, name, joins.reshaping))
        yield


class _Joins:
    """Functions that note the shares that they join."""

    def __init__(self, hook_context: HookContext) -> None:
        self.hook_context, self.batches = hook_context, hook_context.batches

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
        def repeat(tensor: torch.Tensor, *sizes: Any, **named: Any) -> torch.Tensor:
            given = next(iter(named.values()), sizes)
            times = given[0] if given and isinstance(given[0], tuple | list) else given
            if tensor.dim() and len(times) == tensor.dim() and batches.sizes and isinstance(times[0], int):
                batches.join([len(tensor)] * times[0])
            return original(tensor, *sizes, **named)  # type: ignore[no-any-return]

        return repeat

    def interleaving(self, original: Any) -> Any:
        """Make `repeat_interleave`, which puts copies of each row below it."""
        batches = self.batches

        @wraps(original)
        def repeat(*args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor = original(*args, **kwargs)
            given, times = (*args, None, None)[:2]
            if isinstance(given, torch.Tensor) and isinstance(kwargs.get("repeats", times), int):
                rows = len(given) if given.dim() == result.dim() > 0 else 0
                if batches.sizes and rows and not torch.compiler.is_compiling():
                    batches.merge((rows, len(result) // rows), len(result))
            return result

        return repeat

    def reshaping(self, original: Any) -> Any:
        """Make `reshape` and the like, which may put a dimension of the rows and others together."""
        batches = self.batches

        @wraps(original)
        def reshape(*args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor = original(*args, **kwargs)
            given = args[0] if args else None
            if batches.sizes and type(given) is torch.Tensor and not torch.compiler.is_compiling():
                before, after = given.shape, result.shape
                if len(before) > len(after) > 0:
                    batches.merge(before, after[0])
                elif batches.flat and 0 < len(before) < len(after):
                    self._taken_apart(before, after)
            return result

        return reshape

    def _taken_apart(self, before: torch.Size, after: torch.Size) -> None:
        """Tell where what was drawn with the rows first is used with the shares first."""
        rows = self.batches.latest
        apart = after[0] * after[1] == before[0] and after[1] == rows != after[0]
        if apart and before[0] in self.batches.flat:
            tell_once(self.hook_context, "shares", _SHARES)
