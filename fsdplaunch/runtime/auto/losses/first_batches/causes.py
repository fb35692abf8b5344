"""Find what a script computes of a rank's own rows and then computes with, beside the loss's own sum or mean."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from fsdplaunch.runtime.auto.losses.first_batches.all_rows import AllRows
from fsdplaunch.runtime.auto.losses.first_batches.numbers import Change, as_given
from fsdplaunch.runtime.auto.losses.first_batches.own_loss import OwnLoss, is_close, leaves_of
from fsdplaunch.runtime.auto.losses.first_batches.program import Call, Given, Made, Read, marks, name_of

Results = Mapping[int, list[Any]]
"""Of each call, by its number."""


def cause_of(own: OwnLoss, tensors: Mapping[int, AllRows], change: Change) -> str:
    """Return the first call whose result is other for all rows, has none, and meets rows later.

    Args:
        own: The loss of this rank.
        tensors: What its program is given, of all ranks.
        change: The numbers of this rank's rows to those of all.

    Returns:
        "" where there is none, or it cannot be found.
    """
    with suppress(Exception):  # of torch: numbers that do not fit
        mine = own.program.results(leaves_of(own.tensors), as_given)
        whole = own.program.results(leaves_of({number: each.tensor for number, each in tensors.items()}), change)
        for number, call in own.program.calls.items():
            if _is_other(mine[number], whole[number]) and _meets_rows(own, number, mine, whole, tensors):
                return f"{place_of(call)} is over each rank's own rows"
    return ""


def place_of(call: Call) -> str:
    """Return a call and its line: `mean at train.py:3`."""
    return f"{name_of(call.function).strip('_') or 'a call'} at {call.line}"


def _is_other(mine: list[Any], whole: list[Any]) -> bool:
    """Return whether a result has no rows, and is another for the rows of all ranks."""
    one, other = mine[0], whole[0]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.is_floating_point() and not is_close(one, other)
    return type(one) is float and one != other


def _meets_rows(own: OwnLoss, number: int, mine: Results, whole: Results, tensors: Mapping[int, AllRows]) -> bool:
    return any(
        _uses(call, number) and _has_rows(call, mine, whole, tensors) for call in own.program.calls.values()
    )


def _uses(call: Call, number: int) -> bool:
    return any(isinstance(each, Made | Read) and each.call == number for each in marks(call.args, call.kwargs))


def _has_rows(call: Call, mine: Results, whole: Results, tensors: Mapping[int, AllRows]) -> bool:
    """Return whether a call is given rows."""
    for each in marks(call.args, call.kwargs):
        if isinstance(each, Given) and tensors[each.number].dim is not None:
            return True
        if isinstance(each, Made):
            one, other = mine[each.call][each.place], whole[each.call][each.place]
            if getattr(one, "shape", None) != getattr(other, "shape", None):
                return True
    return False
