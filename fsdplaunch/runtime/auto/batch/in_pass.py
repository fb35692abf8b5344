"""What the rows of a divided pass share: random numbers are drawn, and BatchNorm normalises, for the global batch.

A torch operator that draws is known by its tag, on every device. Which dimension of a draw is the rows' is seen by
comparing the draws of a whole pass with those of the same pass divided: it is the one that is shorter.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch.overrides import TorchFunctionMode

from fsdplaunch.runtime.auto.batch.rank_rows import RankRows
from fsdplaunch.runtime.torch_internals.distributed import is_random
from fsdplaunch.runtime.torch_internals.tensors import (
    TorchDispatchMode,
    argument_names,
    operator_name,
    recomputes_later,
    tree_map,
    written_places,
)

_Shape = tuple[int, ...]
_DROPOUT = torch.ops.aten.native_dropout.default


class UndividedError(Exception):
    """A pass cannot be computed from a rank's own rows."""


@dataclass(slots=True)
class Draws:
    """The draws of one kind of pass."""

    shapes: list[tuple[Any, _Shape]] = field(default_factory=list)  # of those of a whole pass, with the operators
    orders: list[tuple[int, ...]] = field(default_factory=list)  # in which their dimensions are filled in memory
    dims: list[int | None] = field(default_factory=list)  # of rows, in those of a divided pass; None without any

    def note(self, func: Any, args: Any) -> None:
        """Note a draw of a whole pass."""
        self.shapes.append((func, _shape_of(args)))
        self.orders.append(_order_of(next((each for each in args if isinstance(each, torch.Tensor)), None)))

    def learn(self, func: Any, shape: _Shape, ranks: int) -> int | None:
        """Return the rows' dimension of the first divided pass's next draw, by that of the whole pass there."""
        place = len(self.dims)
        if place >= len(self.shapes) or self.shapes[place][0] is not func:
            raise UndividedError
        whole = self.shapes[place][1]
        differs = [dim for dim, (one, other) in enumerate(zip(whole, shape, strict=False)) if one != other]
        fits = len(differs) <= 1 and all(whole[dim] == shape[dim] * ranks for dim in differs)
        if len(whole) != len(shape) or not fits:
            raise UndividedError
        self.dims.append(differs[0] if differs else None)
        return self.dims[-1]

    def dim_of(self, place: int, func: Any, shape: _Shape, own: int) -> int | None:
        """Return the rows' dimension of a later pass's draw: of that at its place, or of one that is like it."""
        here = place < len(self.dims) and self.shapes[place][0] is func
        if here and len(self.shapes[place][1]) == len(shape):
            return self.dims[place]
        like = zip(self.shapes, self.dims, strict=False)
        dims = {dim for (other, known), dim in like if other is func and len(known) == len(shape)}
        return min((dim for dim in dims if dim is not None and shape[dim] % own == 0), default=None)


class _Recording(TorchDispatchMode):
    """Notes what a whole pass draws."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs):
            self.draws.note(func, args)
        return func(*args, **(kwargs or {}))


class GlobalDraws(TorchDispatchMode):
    """Draws for the global batch and keeps this rank's rows; in a backward, `again` as in the pass."""

    def __init__(
        self, rows: RankRows, draws: Draws, *, learning: bool = False, again: "GlobalDraws | None" = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[tuple[Any, _Shape], int | None] = {}  # by operator and shape, the rows' dimension of draws
        self.again = again.made if again is not None else {}
        self.rows, self.draws, self.learning = rows, draws, learning
        self.trains = torch.is_grad_enabled()
        self.place = 0
        self.recomputed = False  # whether something was drawn in a part that the backward computes again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        self.recomputed = self.recomputed or recomputes_later(trains=self.trains)
        shape = _shape_of(args)
        if (func, shape) in self.again:
            dim = self.again[func, shape]
        elif self.learning:
            dim = self.draws.learn(func, shape, self.rows.ranks)
        else:
            dim = self.draws.dim_of(self.place, func, shape, self.rows.own)
        known = self.place < len(self.draws.orders) and len(self.draws.orders[self.place]) == len(shape)
        # Of one row the strides do not say how the rows of all lie.
        order = self.draws.orders[self.place] if known and not self.again else None
        self.place += 1
        self.made[func, shape] = dim
        if dim is None:
            return func(*args, **kwargs)
        return _draw_rows(func, args, kwargs, self.rows, shape, dim, order)


_draws_at_all = cache(is_random)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator draws random numbers, with what it is given."""
    if not _draws_at_all(func):
        return False
    if func is _DROPOUT:
        return bool(args[2] is not False and args[1])
    place = _place_of("dropout_p", func)
    if place is None:
        return True
    return bool(args[place] if len(args) > place else (kwargs or {}).get("dropout_p", 0.0))


@cache
def _place_of(name: str, func: Any) -> int | None:
    names = argument_names(func)
    return names.index(name) if name in names else None


def _shape_of(args: Any) -> _Shape:
    """Return the shape of a draw: of the first tensor, or the size, that the operator is given."""
    for each in args:
        if isinstance(each, torch.Tensor):
            return tuple(each.shape)
        if isinstance(each, list | tuple):
            return tuple(each)
    return ()


def _empty(like: torch.Tensor, total: _Shape, order: tuple[int, ...] | None) -> torch.Tensor:
    """Return an empty tensor for all rows, whose dimensions lie in memory, and are filled, in the same order."""
    order = order or _order_of(like)
    back = [order.index(dim) for dim in range(like.dim())]
    return like.new_empty([total[dim] for dim in order]).permute(back)


def _order_of(tensor: torch.Tensor | None) -> tuple[int, ...]:
    if tensor is None:
        return ()
    strides: tuple[int, ...] = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def _draw_rows(
    func: Any, args: Any, kwargs: Any, rows: RankRows, shape: _Shape, dim: int, order: tuple[int, ...] | None
) -> Any:
    """Compute an operator that draws for the rows of all ranks, and return this rank's of its result."""
    if _place_of("dropout_p", func) is not None:
        raise UndividedError
    total = (*shape[:dim], shape[dim] * rows.ranks, *shape[dim + 1 :])
    if func is _DROPOUT:
        _, mask = func(args[0].new_ones(total), *args[1:])
        mask = rows.slice_of(mask, dim).contiguous()
        return args[0] * mask * (1 / (1 - args[1]) if args[1] < 1 else 0.0), mask
    written = written_places(func)
    pattern = operator_name(func).endswith("_like")

    def widened(value: Any, *, unread: bool) -> Any:
        if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
            # What is only filled, or only taken for a pattern, need not have the other ranks' values.
            return _empty(value, total, order) if unread else rows.all_slices(value, dim)
        return list(total) if isinstance(value, list | tuple) and tuple(value) == shape else value

    full = [widened(each, unread=fills or pattern) for each, fills in zip(args, written, strict=False)]
    result = func(*full, **kwargs)
    for fills, given, filled in zip(written, args, full, strict=False):
        if fills and given is not filled:
            given.copy_(rows.slice_of(filled, dim))
    back = {id(filled): given for given, filled in zip(args, full, strict=True) if given is not filled}

    def own(value: Any) -> Any:
        if id(value) in back:
            return back[id(value)]
        mine = isinstance(value, torch.Tensor) and value.dim() > dim and value.shape[dim] == total[dim]
        return rows.slice_of(value, dim).contiguous() if mine else value

    return tree_map(own, result)


_BATCH_NORM = inspect.signature(F.batch_norm)


class GlobalBatchNorm(TorchFunctionMode):
    """Normalises by the statistics of all ranks' rows, where BatchNorm uses those of the batch."""

    def __init__(self, rows: RankRows) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            given = _BATCH_NORM.bind(*args, **(kwargs or {}))
            given.apply_defaults()
            if given.arguments.pop("training"):
                return _batch_norm(self.rows, *given.arguments.values())
        return func(*args, **(kwargs or {}))


def _batch_norm(
    rows: RankRows,
    given: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """Normalise by the rows of several ranks; in two steps, for a variance as exact as torch's. Collective."""
    exact = given if given.dtype in (torch.float32, torch.float64) else given.float()
    others = [dim for dim in range(given.dim()) if dim != 1]
    shape = [1, -1, *[1] * (given.dim() - 2)]
    own = exact.new_tensor([given.numel() // max(given.size(1), 1)])
    sums = rows.sum(torch.cat([exact.sum(others), own]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = exact - mean.view(shape)
    variance = rows.sum(centred.square().sum(others)) / count
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = variance * (count / (count - 1).clamp(min=1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    result = centred * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        result = result * weight.to(result.dtype).view(shape)
    if bias is not None:
        result = result + bias.to(result.dtype).view(shape)
    normalised: torch.Tensor = result.to(given.dtype)
    return normalised


@contextmanager
def recording_draws(draws_: Draws) -> Iterator[None]:
    """Note the draws of a whole pass."""
    draws_.shapes, draws_.orders, draws_.dims = [], [], []
    with _Recording(draws_):
        yield
