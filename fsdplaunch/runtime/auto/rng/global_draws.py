"""Draw random numbers for the rows of the global batch and keep this rank's, where the global batch is kept.

Needed because dropout masks and noise are drawn for the rows that a rank has: without this every rank would draw
the same ones for its own rows, and none of them those of one process. On the CPU; generators of GPUs draw in
an order of their own.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.row_order import tell_once
from fsdplaunch.runtime.auto.rng.drawing_code import (
    has_literal_size,
    has_size_of_rows,
    is_recurrent_and_packed,
    sizes_of_distributions,
)
from fsdplaunch.runtime.auto.rng.joined_rows import joining_rows
from fsdplaunch.runtime.auto.rng.numpy_draws import drawing_by_numpy
from fsdplaunch.runtime.auto.rng.own_rows import own_part
from fsdplaunch.runtime.auto.rng.python_draws import drawing_by_python
from fsdplaunch.runtime.auto.rng.rejected_draws import drawing_by_rejection
from fsdplaunch.runtime.auto.rng.single_draws import note_single
from fsdplaunch.runtime.auto.rng.table_draws import drawing_from_tables
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.operators import below, drawing_instead

_IN_PLACE = (
    *("bernoulli_.float", "normal_", "uniform_", "random_", "random_.to", "random_.from", "exponential_"),
    *("cauchy_", "geometric_", "log_normal_"),
)
"""Operators that dropout of any kind, and noise drawn in place, come down to."""
_SIZED = ("rand", "randn")
_PACKED = (
    "a recurrent layer draws dropout for sequences that are packed together: each rank draws for its own rows only"
)
_LIKE_METHODS = ("bernoulli", "multinomial")
_LIKE = ("rand_like", "randn_like", "randint_like", "normal", *_LIKE_METHODS)


@contextmanager
def drawing_for_global_batch(hook_context: HookContext) -> Iterator[None]:
    """Draw as one process does, where the configuration keeps the global batch."""
    if not hook_context.keeps_batch or hook_context.data.size == 1:
        yield
        return
    slicing = _Slicing(hook_context)
    with ExitStack() as stack:
        stack.enter_context(drawing_instead({name: slicing.in_place(_operator(name)) for name in _IN_PLACE}))
        for name in _SIZED:
            stack.enter_context(replaced(torch, name, slicing.sized))
        for name in _LIKE:
            stack.enter_context(replaced(torch, name, slicing.like))
        for name in _LIKE_METHODS:
            stack.enter_context(replaced(torch.Tensor, name, slicing.like))
        stack.enter_context(replaced(torch, "randint", slicing.integers))
        stack.enter_context(joining_rows(hook_context))
        stack.enter_context(drawing_by_numpy(hook_context, slicing.rows_first))
        stack.enter_context(drawing_by_python(hook_context, slicing.rows_first))
        stack.enter_context(drawing_by_rejection(hook_context, slicing.dim_of_rows))
        stack.enter_context(drawing_from_tables(hook_context, slicing.rows_first))
        yield


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


class _Slicing:
    """This rank's part of what is drawn."""

    def __init__(self, hook_context: HookContext) -> None:
        self.hook_context = hook_context

    def _trains(self, *rows: int) -> bool:
        """Return whether what is drawn now belongs to the rows of a training batch.

        Adversarial training draws for its batch with the model in evaluation, but with gradients; what makes
        targets of the batch at hand, by a model in evaluation, has as many rows as that.

        Args:
            rows: How many there may be.
        """
        context = self.hook_context
        if context.streams.alike or not context.batches.sizes or not context.ownership.ours:
            return False
        of_batch = torch.is_grad_enabled() or context.batches.latest in rows
        of_batch = of_batch and not context.batches.complete
        return of_batch or any(model.training for model in list(context.models))

    def _own(self, drawn: torch.Tensor, dim: int) -> torch.Tensor:
        return own_part(self.hook_context, drawn, dim)

    def rows_first(self, size: Any) -> bool:
        """Return whether a size that is given is that of one value, or several, per row of this rank's batch."""
        return (self._has_rows_first(size) and not has_literal_size()) or self._is_flat(size)

    def _is_flat(self, shape: Any) -> bool:
        """Return whether a single size is that of several values per row, `n * 5`: those of a row in a row."""
        batches = self.hook_context.batches
        rows = batches.latest
        if len(shape) != 1 or not rows or shape[0] <= rows or shape[0] % rows or shape[0] in batches.sizes:
            return False
        flat = self._trains(rows) and has_size_of_rows(batches.sizes, times=shape[0] // rows)
        if flat and shape[0] not in batches.joined:
            batches.flat.add(shape[0])
        return flat

    def _has_rows_first(self, shape: Any) -> bool:
        batches = self.hook_context.batches
        return bool(
            len(shape)
            and (shape[0] in batches.sizes or shape[0] in batches.joined)
            and batches.dim_of_rows(shape) == 0
            and self._trains(shape[0])
        )

    def _repeats_rows(self, given: torch.Tensor) -> bool:
        """Return whether a table has several rows for each of this rank's, such as answers to one prompt."""
        if not self._trains() or not given.shape[1:]:
            return False
        rows = self.hook_context.batches.latest
        return rows > 0 and given.size(0) > rows and given.size(0) % rows == 0

    def in_place(self, operator: Any) -> Callable[..., torch.Tensor]:
        """Make an operator that fills a tensor."""

        def draw(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            dim = self.dim_of_rows(tensor)
            with below():
                if (
                    self.hook_context.streams.seed_offset
                    and not tensor.dim()
                    and not self.hook_context.streams.alike
                ):
                    return operator(tensor, *args, **kwargs).add_(self.hook_context.streams.seed_offset)  # type: ignore[no-any-return]
                if dim is None:
                    return operator(tensor, *args, **kwargs)  # type: ignore[no-any-return]
                every = _empty_for_all(tensor, dim, self.hook_context.data.size)
                operator(every, *args, **kwargs)
                return tensor.copy_(self._own(every, dim))

        return draw

    def dim_of_rows(self, tensor: torch.Tensor) -> int | None:
        """Return the dimension of a tensor that has the rows of this rank's batch; None if there is none."""
        if type(tensor) is not torch.Tensor or tensor.requires_grad or not tensor.dim():
            return None
        first = int(self.hook_context.batches.time_first)
        if not self._trains(*tensor.shape[first : first + 1]):  # a model may have as many heads as there are rows
            return None
        packed = is_recurrent_and_packed()
        if packed:
            tell_once(self.hook_context, "packed", _PACKED)
            return None
        if packed is not None and tensor.dim() > 2:  # noqa: PLR2004  (times, rows, features)
            return 1 if tensor.size(1) in self.hook_context.batches.sizes else None
        dim = self.hook_context.batches.dim_of_rows(tensor.shape)
        if dim is None:
            _, asked = sizes_of_distributions() or ((), tensor.shape)
            return 0 if self._is_flat(asked) else None
        return None if has_literal_size() else dim

    def sized(self, original: Any) -> Any:
        """Make a function that is given a size."""

        @wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            size: Any = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
            if not self.rows_first(size):
                note_single(self.hook_context, size)
                return original(*args, **kwargs)
            rest = {name: value for name, value in kwargs.items() if name != "size"}
            return self._own(original((size[0] * self.hook_context.data.size, *size[1:]), **rest), 0)

        return draw

    def integers(self, original: Any) -> Any:
        """Make `randint`: limits, then a size."""

        @wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            size: Any = kwargs.get("size", args[-1] if args else ())
            if isinstance(size, int) or not self.rows_first(size):
                note_single(self.hook_context, size)
                return original(*args, **kwargs)
            limits = args if "size" in kwargs else args[:-1]
            every = (size[0] * self.hook_context.data.size, *size[1:])
            return self._own(original(*limits, **{**kwargs, "size": every}), 0)

        return draw

    def like(self, original: Any) -> Any:
        """Make a function that is given a tensor of the shape, or of the probabilities, to draw."""

        @wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            first = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)), None)
            if first is None:
                return self.integers(original)(*args, **kwargs)
            if type(first) is not torch.Tensor or not (
                self._has_rows_first(first.shape) or self._repeats_rows(first) or self._is_flat(first.shape)
            ):
                return original(*args, **kwargs)
            every = [self._for_all(arg, first.size(0)) for arg in args]
            named = {name: self._for_all(arg, first.size(0)) for name, arg in kwargs.items()}
            return self._own(original(*every, **named), 0)

        return draw

    def _for_all(self, value: Any, rows: int) -> Any:
        """Return an argument with as many rows as all ranks have, of which this rank's are its own."""
        if not isinstance(value, torch.Tensor) or not value.dim() or value.size(0) != rows:
            return value
        return value.detach().repeat(self.hook_context.data.size, *[1] * (value.dim() - 1))


def _empty_for_all(tensor: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """Return an empty tensor for the rows of all ranks, in the order in memory that the given one has.

    A single row has the stride of what is around it where it is further in: (8, 8, 1) for one of (rows, 5, 8) with
    the 5 outermost, (40, 8, 1) with the rows outermost.
    """
    strides, sizes = tensor.stride(), tuple(tensor.shape)
    order = sorted(range(tensor.dim()), key=lambda each: (-strides[each], -sizes[each], each))
    shape = [tensor.size(each) * (ranks if each == dim else 1) for each in order]
    back = [order.index(each) for each in range(tensor.dim())]
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device).permute(back)
