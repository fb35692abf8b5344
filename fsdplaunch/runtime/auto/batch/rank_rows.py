"""The rows of a batch that each data rank computes: cut on entry, joined on exit, and by which rule.

Every function of `RankRows` is differentiable any number of times. The loss behind what is gathered is the same
on all ranks, and FSDP averages gradients over them: a gradient that enters a rank's rows is multiplied by their
number. How outputs are joined is measured against a whole pass; what scripts seldom look at is gathered late.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.runtime.torch_internals.distributed import all_gather
from fsdplaunch.runtime.torch_internals.tensors import (
    computing_as_plain_tensors,
    metadata_getters,
    numbers_of_object,
    replace_tensors,
    tensors_held,
    tree_map,
    wrapper_tensor,
)

_Map = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class RankRows:
    """One rank's rows of a global batch of `total`, which the ranks of a group, or all, divide evenly."""

    total: int
    rank: int
    ranks: int
    group: dist.ProcessGroup | None = None

    @property
    def own(self) -> int:
        """Return how many rows each rank has."""
        return self.total // self.ranks

    def slice_of(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return a view of this rank's part of a dimension that all ranks divide evenly."""
        part = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.rank * part, part)

    def all_slices(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return every rank's part of a dimension put together, without gradients. Collective."""
        if dim:
            return torch.cat(gather_equal(tensor, self.ranks, self.group).unbind(), dim)
        every = tensor.new_empty(tensor.shape[0] * self.ranks, *tensor.shape[1:])
        _gather_into(every, tensor, self.group)
        return every  # no view: a script may change what a model returns

    def cut(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's rows; the gradient of the rows of all ranks is that of the tensor."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return self.slice_of(tensor, dim)
        # No view: one out of a function of ours could not be changed in place.
        return _apply(
            tensor,
            lambda whole: self.slice_of(whole, dim).clone(),
            lambda own: self.all_slices(own, dim) / self.ranks,
        )

    def gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the rows of all ranks; the gradient of this rank's rows is their part of it. Collective."""
        return _apply(
            tensor, lambda own: self.all_slices(own, dim), lambda whole: self.slice_of(whole, dim) * self.ranks
        )

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that all ranks compute their rows with; its gradient is that of all of them."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        return _apply(tensor, lambda each: each.view_as(each), lambda each: self._total(each) / self.ranks)

    def weighted_sum(self, tensor: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
        """Return the sum over ranks of what each has computed of its rows, times its weight. Collective."""

        def summed(own: torch.Tensor) -> torch.Tensor:
            every = gather_equal(own, self.ranks, self.group)
            weight = torch.tensor(weights, dtype=torch.float64).view(-1, *[1] * own.dim()).to(every.device)
            return (every.double() * weight).sum(0).to(own.dtype)

        factor = weights[self.rank] * self.ranks
        return _apply(tensor, summed, lambda gradient: gradient * factor)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, on which the results of all of them depend. Collective."""
        return _apply(tensor, self._total, self._total)

    def _total(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=self.group)
        return total


class _Linear(torch.autograd.Function):
    """A linear function of tensors, whose gradient another one gives; each gives that of the other."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: _Map, back: _Map) -> torch.Tensor:
        ctx.there, ctx.back = there, back
        return there(tensor.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _apply(gradients[0], ctx.back, ctx.there), None, None


_apply: Callable[[torch.Tensor, _Map, _Map], torch.Tensor] = _Linear.apply


@cache
def data_group(rank: int, size: int, readers: int) -> dist.ProcessGroup | None:
    """Return the group of the ranks that read different data, this one among them; None for all. Collective."""
    if readers == size:
        return None
    alike = size // readers
    groups = [dist.new_group(list(range(first, size, alike))) for first in range(alike)]
    group: dist.ProcessGroup = groups[rank % alike]
    return group


def gather_equal(tensor: torch.Tensor, ranks: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the tensors of all ranks, of one shape and dtype, as `[ranks, *shape]`. Collective."""
    every = tensor.new_empty(ranks, *tensor.shape)
    _gather_into(every, tensor, group)
    return every


def _gather_into(every: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Write the tensors of all ranks one after the other, as bytes: not every backend sends every dtype."""
    if tensor.numel():
        flat, own = every.view(-1), tensor.contiguous().view(-1)
        all_gather(flat.view(torch.uint8), own.view(torch.uint8), group)


class LateRows(torch.Tensor):
    """Stands for the rows of all ranks; whatever computes with it computes with them. Collective where it does."""

    own: torch.Tensor
    rows: RankRows
    dim_of_rows: int
    whole: torch.Tensor | None

    @staticmethod
    def of(own: torch.Tensor, rows: RankRows, dim: int) -> "LateRows":
        """Return what stands for the rows of all ranks."""
        shape = list(own.shape)
        shape[dim] *= rows.ranks
        late = wrapper_tensor(LateRows, own, shape)
        late.own, late.rows, late.dim_of_rows, late.whole = own, rows, dim, None
        return late  # type: ignore[no-any-return]

    def gathered(self) -> torch.Tensor:
        """Return the rows of all ranks. Collective at the first call."""
        if self.whole is None:
            with torch.set_grad_enabled(self.own.requires_grad):
                self.whole = self.rows.gather(self.own, self.dim_of_rows)
        return self.whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with the rows of all ranks."""
        if func in metadata_getters():
            with computing_as_plain_tensors():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(_gathered, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with the rows of all ranks inside of a function of autograd's, too."""
        args, kwargs = tree_map(_gathered, (args, kwargs or {}))
        return func(*args, **kwargs)


def _gathered(value: Any) -> Any:
    return value.gathered() if isinstance(value, LateRows) else value


Weights = dict[str, list[float]]
"""By the name of a rule, each rank's weight in the sum that joins what they have computed."""


@dataclass(slots=True)
class Same:
    """What does not depend on rows: all ranks return the same."""

    def join(self, value: Any, _rows: RankRows, _weights: Weights, _late: bool) -> Any:
        """Return it."""
        return value


@dataclass(slots=True)
class Rows:
    """A tensor with the rank's rows in one dimension."""

    dim: int

    def join(self, value: Any, rows: RankRows, _weights: Weights, late: bool) -> Any:
        """Return the rows of all ranks: at once, or where they are first looked at beside a loss. Collective."""
        return LateRows.of(value, rows, self.dim) if late else rows.gather(value, self.dim)


@dataclass(slots=True)
class Joined:
    """A loss, or another sum or mean over rows, by the rules that have agreed with every whole pass so far."""

    rules: list[str]

    def weights(self, weights: Weights) -> list[float]:
        """Return the weight of each rank for a batch."""
        return weights[self.rules[0]]

    def is_clear(self, weights: Weights) -> bool:
        """Return whether all rules that are left are one for a batch."""
        if any(rule not in weights for rule in self.rules):
            return False
        pairs = [pair for rule in self.rules for pair in zip(weights[rule], self.weights(weights), strict=True)]
        return all(abs(a - b) <= 1e-9 * max(abs(a), abs(b)) for a, b in pairs)

    def join(self, value: Any, rows: RankRows, weights: Weights, _late: bool) -> Any:
        """Return the sum over ranks. Collective."""
        return rows.weighted_sum(value, self.weights(weights))


@dataclass(slots=True)
class Held:
    """An object of the script's own class, or a cache, with tensors in it that are joined as `inside` says."""

    inside: "list[Returned]"

    def join(self, value: Any, rows: RankRows, weights: Weights, _late: bool) -> Any:
        """Return the object with joined tensors in it; rows are gathered where they are looked at."""
        tensors = list(tensors_held(value))
        pairs = zip(self.inside, tensors, strict=True)
        joined = {id(tensor): each.join(tensor, rows, weights, True) for each, tensor in pairs}
        replace_tensors(value, lambda tensor: joined.get(id(tensor), tensor))
        return value


Returned = Same | Rows | Held | Joined


def losses_in(returned: "Iterable[Returned]") -> Iterator[Joined]:
    """Yield what is joined by a rule, also in objects."""
    for each in returned:
        if isinstance(each, Joined):
            yield each
        elif isinstance(each, Held):
            yield from losses_in(each.inside)


def weights_of(leaves: Sequence[Any], rows: RankRows) -> Weights:
    """Return the rules by which a sum or a mean over rows may be made of the ranks' for a batch.

    A sum; a mean over the rows; a mean over what a tensor that is given counts: labels that are not negative, as
    those that losses leave out are, or not 0; also without those of the first place, which causal language models
    leave out; weights.
    """
    found: Weights = {"sum": [1.0] * rows.ranks, "mean over rows": [1 / rows.ranks] * rows.ranks}
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() not in (1, 2) or leaf.shape[0] != rows.total:
            continue
        if leaf.is_complex() or leaf.requires_grad or leaf.is_meta:
            continue
        counted = {"weights": leaf}
        if not leaf.is_floating_point():
            counted = {"labels": leaf >= 0, "numbers": leaf != 0}
            if leaf.dim() > 1 and leaf.shape[1] > 1:
                counted |= {f"next {name}": each[:, 1:] for name, each in counted.items()}
        for name, each in counted.items():
            counts = each.reshape(rows.ranks, -1).double().sum(1).tolist()
            if sum(counts) > 0 and min(counts) >= 0:
                found[f"{name} of {place}"] = [count / sum(counts) for count in counts]
    return found


Form = int | str | tuple[Any, ...] | None
"""How an output of fewer rows differs from that of all: the rows' dimension, or a word; for an object
the forms of what it holds; None if it cannot be."""


def form_of(whole: Any, part: Any, rows: RankRows) -> Form:
    """Return how an output of this rank's rows differs in shape from that of all rows."""
    if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor):
        if type(whole) is not type(part):
            return None
        wholes, parts = list(tensors_held(whole)), list(tensors_held(part))
        if len(wholes) != len(parts) or numbers_of_object(whole) != numbers_of_object(part):
            return None
        forms = tuple(form_of(one, other, rows) for one, other in zip(wholes, parts, strict=True))
        return None if None in forms else forms or "plain"
    if whole.dim() != part.dim() or whole.dtype != part.dtype:
        return None
    differs = [dim for dim, (one, other) in enumerate(zip(whole.shape, part.shape, strict=True)) if one != other]
    if not differs:
        return "sum"
    alone = len(differs) == 1 and whole.shape[differs[0]] == part.shape[differs[0]] * rows.ranks
    return differs[0] if alone else None


def measured(
    form: Form, whole: Any, part: Any, rows: RankRows, weights: Weights, tolerance: float
) -> Returned | None:
    """Return how an output of a divided pass is joined; None where no way gives that of a whole. Collective."""
    if isinstance(form, tuple):
        return _measured_object(form, whole, part, rows, weights, tolerance)
    if form == "plain":
        return Same() if whole == part or not isinstance(whole, int | float | str) else None
    if isinstance(form, int):
        return Rows(form) if _agrees(rows.all_slices(part, form), whole, tolerance) else None
    # Rounding cancels in what is added up, and means over nearly as many rows are nearly the same.
    tolerance /= 10
    every = gather_equal(part, rows.ranks, rows.group)
    if all(_agrees(each, whole, tolerance) for each in every):
        return Same()
    rules = []
    for name, by_rank in weights.items():
        weight = torch.tensor(by_rank, dtype=torch.float64, device=every.device).view(-1, *[1] * part.dim())
        if _agrees((every.double() * weight).where(weight != 0, 0.0).sum(0), whole, tolerance):
            rules.append(name)
    return Joined(rules) if rules and whole.is_floating_point() else None


def _measured_object(
    forms: tuple[Form, ...], whole: Any, part: Any, rows: RankRows, weights: Weights, tolerance: float
) -> Held | None:
    wholes = list(tensors_held(whole))
    places = zip(forms, wholes, tensors_held(part), strict=True)
    found = [measured(*place, rows, weights, tolerance) for place in places]
    inside = [each for each in found if each is not None]
    if len(inside) < len(forms):
        return None
    held = Held(inside)
    # Joined once for trial: a tensor that stands in a tuple or in slots of the object is found and not replaced.
    joined = [_gathered(each) for each in tensors_held(held.join(part, rows, weights, True))]
    pairs = zip(joined, wholes, strict=True)
    return held if all(a.shape == b.shape and _agrees(a, b, tolerance) for a, b in pairs) else None


_SMALL = 1e-2
"""Values below count as this large: what cancels to nearly nothing is rounded by the size of its terms."""


def _agrees(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if not other.is_floating_point():
        return torch.equal(one.to(other.dtype), other)
    if not other.numel():
        return True
    sizes = (float(each.abs().nan_to_num(0.0, posinf=0.0).max()) for each in _in_pieces(other))
    largest = max(_SMALL, *sizes)
    return are_close(one, other, tolerance, tolerance * largest)


def are_close(one: torch.Tensor, other: torch.Tensor, relative: float, absolute: float) -> bool:
    """Return whether two tensors of one shape differ by no more than this, compared in fp64; NaN equals NaN."""
    return all(
        torch.allclose(a, b, rtol=relative, atol=absolute, equal_nan=True)
        for a, b in zip(_in_pieces(one), _in_pieces(other), strict=True)
    )


def _in_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's values in fp64, some at a time: logits are large, and a comparison holds several copies."""
    for piece in tensor.reshape(-1).split(1 << 20):
        yield piece.double()
