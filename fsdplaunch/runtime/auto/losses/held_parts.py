"""Find the tensors that a script holds of a loss: `loss` where it calls `(loss / 2).backward()`, or its terms.

A graph knows no tensors, only how they were computed. So the variables of the running functions are looked
through, with what is in their lists, dictionaries and attributes: what a script prints of a loss is there.
"""

import contextlib
import inspect
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.losses.graph import BatchReduction
from fsdplaunch.runtime.auto.losses.plan import ReductionPlan
from fsdplaunch.runtime.auto.losses.whole_value import common_factor

_MOST_ELEMENTS = 64
"""Of a tensor that holds losses, such as one for each class."""
_MOST_ENTRIES = 256
"""Of a list, a dictionary or an object that is looked into."""
_NO_VALUES = (torch.nn.Module, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str, int)
_SNAPSHOTS = sys.version_info < (3, 13)


class Part(NamedTuple):
    """A tensor that the script holds of a loss.

    Attributes:
        place: Of its node in the graph, and which of its results it is; with how many elements.
        value: The tensor.
    """

    place: tuple[int, int, int]
    value: torch.Tensor


class Weighted(NamedTuple):
    """One reduction of a loss, and by what its values count.

    Attributes:
        reduction: Of this rank.
        plan: What its gradient needs; None for what the script multiplies by 0.
        factor: By which a rank's value counts in the mean over ranks; None where that is not known.
    """

    reduction: BatchReduction
    plan: ReductionPlan | None
    factor: float | None


def held_parts(loss: torch.Tensor, nodes: Sequence[Any]) -> list[Part]:
    """Return what the running functions hold of a loss, but for itself, in the order of the graph.

    Args:
        loss: Of one element.
        nodes: Of its graph, down to where it is reduced over rows.
    """
    places = {node: place for place, node in enumerate(nodes)}
    found = {}
    for value in _held(sys._getframe(1)):
        if value is loss or not value.requires_grad or isinstance(value, DTensor):
            continue
        place = places.get(value.grad_fn)
        if place is not None and 0 < value.numel() <= _MOST_ELEMENTS and value.is_floating_point():
            found[id(value)] = Part((place, value.output_nr, value.numel()), value)
    return sorted(found.values(), key=lambda part: part.place)


def _held(frame: types.FrameType | None) -> Iterator[torch.Tensor]:
    """Yield the tensors of the functions that are running, but for those of torch and of this package."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in ("torch", "fsdplaunch"):
            names = frame.f_locals
            for value in list(names.values()):
                yield from [value] if isinstance(value, torch.Tensor) else _inside(value)
            if _SNAPSHOTS and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                names.clear()  # a copy that the frame keeps: tensors in it would outlive their variables
        frame = frame.f_back


def _inside(value: Any) -> list[torch.Tensor]:
    """Return the tensors that are entries or attributes of an object; not of what they hold."""
    entries: Collection[Any] = ()
    if isinstance(value, dict):
        entries = dict.values(value)
    elif isinstance(value, list | tuple):
        entries = value
    elif not isinstance(value, _NO_VALUES):
        with contextlib.suppress(AttributeError):  # of the type of what has slots; no attribute is computed
            entries = object.__getattribute__(value, "__dict__").values()
    few = list(entries) if len(entries) <= _MOST_ENTRIES else []
    return [each for each in few if isinstance(each, torch.Tensor)]


def part_factor(found: Sequence[BatchReduction], loss: Mapping[Any, Weighted], ranks: int) -> float | None:
    """Return by what this rank's value of a part counts in the mean over ranks; None where that is not known.

    Args:
        found: Where the part is reduced over rows, read from it on.
        loss: What its loss's reductions need, by their nodes.
        ranks: How many ranks share the batch.
    """
    return common_factor([_factor(each, loss.get(each.node), ranks) for each in found])


def _factor(reduction: BatchReduction, of_loss: Weighted | None, ranks: int) -> float | None:
    """Return the factor of one reduction, which a part has without what the script does with it for its loss."""
    plan = None if of_loss is None else of_loss.plan
    if of_loss is None or plan is None or plan.need == "unknown" or reduction.kind == "unknown":
        return None
    if plan.alike:
        return 1.0
    outer = _divisors(of_loss.reduction) - _divisors(reduction)
    within = any(index >= outer for index in plan.counted)
    if reduction.kind == "sum" and not within:
        return float(ranks)
    if plan.need == "ranks" or any(index < outer for index in plan.counted):
        return None
    return of_loss.factor


def _divisors(reduction: BatchReduction) -> int:
    """Return how many amounts of a reduction may be counts; those of the script's come before its own."""
    return sum(each.kind != "scale" for each in reduction.amounts)
