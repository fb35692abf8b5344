"""Compute a rank's loss again, by the calls that made it, with the gradients that the rank adds to the mean."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from fsdplaunch.runtime.auto.losses.first_batches.numbers import as_given
from fsdplaunch.runtime.auto.losses.first_batches.program import Input, Program
from fsdplaunch.runtime.auto.losses.held_parts import Weighted
from fsdplaunch.runtime.torch_internals.graphs.node_kinds import MOST_NODES, kind_of

_SAME, _SAME_HALF = 1e-5, 1e-2
Tensors = Mapping[int, torch.Tensor]
"""What a program is given, by numbers."""


class OwnLoss(NamedTuple):
    """The loss of this rank, computed again.

    Attributes:
        program: By which.
        tensors: What it was given.
        gradients: Of those of them that have some, as the mean over ranks has them.
    """

    program: Program
    tensors: dict[int, torch.Tensor]
    gradients: dict[int, torch.Tensor]


def computed_again(
    loss: torch.Tensor, program: Program | None, inputs: Sequence[Input], weighted: Sequence[Weighted]
) -> OwnLoss | None:
    """Return a loss as it is computed again; None where it does not come to the same.

    Args:
        loss: Whose graph is kept.
        program: By which it was computed; None where it was not recorded.
        inputs: What the recording was given.
        weighted: Where it is reduced over rows, and by what the gradients there are multiplied.
    """
    if program is None:
        return None
    tensors: dict[int, torch.Tensor] = {}
    for number in program.inputs:
        tensor = inputs[number].tensor
        if tensor is None or not inputs[number].is_intact():
            return None
        tensors[number] = tensor
    with suppress(Exception):  # of torch or the script: nothing is known then
        given = leaves_of(tensors)
        again = program.run(given, as_given)
        if is_close(again, loss):
            _multiply_gradients(loss, again, weighted)
            return OwnLoss(program, tensors, gradients_of(again, given))
    return None


def leaves_of(tensors: Tensors, wanted: Callable[[int], bool] | None = None) -> dict[int, torch.Tensor]:
    """Return tensors apart from their graphs, with gradients where they have them.

    Args:
        tensors: Of a program.
        wanted: Whether that of a number is to have gradients; that of its tensor, if left out.
    """
    return {
        number: each.detach().requires_grad_(each.requires_grad if wanted is None else wanted(number))
        for number, each in tensors.items()
    }


def gradients_of(loss: torch.Tensor, given: Tensors) -> dict[int, torch.Tensor]:
    """Return a loss's gradients by what it was computed from."""
    numbers = [number for number, each in given.items() if each.requires_grad]
    found = torch.autograd.grad(loss.sum(), [given[number] for number in numbers], allow_unused=True)
    pairs = zip(numbers, found, strict=True)
    return {number: torch.zeros_like(given[number]) if each is None else each for number, each in pairs}


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two values of a loss are the same but for rounding."""
    most = _SAME if one.dtype in (torch.float32, torch.float64) else _SAME_HALF
    return one.shape == other.shape and torch.allclose(one.detach(), other.detach(), rtol=most, atol=1e-12)


def _multiply_gradients(loss: torch.Tensor, again: torch.Tensor, weighted: Sequence[Weighted]) -> None:
    """Multiply the gradients of a loss that was computed again as those of the first one are."""
    same = _matching(loss.grad_fn, again.grad_fn)
    for each in weighted:
        if each.factor is not None and each.factor != 1 and each.reduction.node in same:
            same[each.reduction.node].register_prehook(_times(each.factor))


def _matching(root: Any, other: Any) -> dict[Any, Any]:
    """Return the nodes of a graph with those of another one that was made by the same calls."""
    found: dict[Any, Any] = {}
    waiting = [(root, other)]
    while waiting and len(found) < MOST_NODES:
        one, two = waiting.pop()
        if one is None or two is None or one in found or kind_of(one) != kind_of(two):
            continue
        found[one] = two
        waiting += zip(
            (each for each, _ in one.next_functions), (each for each, _ in two.next_functions), strict=False
        )
    return found


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda gradients: tuple(None if each is None else each * factor for each in gradients)
