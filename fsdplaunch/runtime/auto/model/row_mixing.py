"""Find out whether a loss compares rows of the batch with each other, as losses with in-batch negatives do.

Needed because each rank compares its own rows only: what the rows of two ranks have to do with each other is in no
rank's loss. Seen by gradients: those of one row's loss must reach no other row of what the model returned.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fsdplaunch.runtime.auto.model.double_backward import noted
from fsdplaunch.runtime.auto.model.loss_graph import BatchReduction
from fsdplaunch.runtime.torch_internals.graph_nodes import fixed_factor, reduced_shape
from fsdplaunch.runtime.torch_internals.tensors import tree_leaves

_KEY = "fsdplaunch_output"
_MOST_NODES = 5000


def mark_outputs(output: Any) -> None:
    """Let the graph of what a model returned remember where it is."""
    for value in tree_leaves(output):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            edge = get_gradient_edge(value)
            noted(edge.node).setdefault(_KEY, {})[edge.output_nr] = value.shape


def compares_rows(loss: torch.Tensor, reductions: Sequence[BatchReduction], rows: int) -> bool:
    """Return whether a row's loss depends on other rows. All ranks call it, for models may gather parameters.

    Args:
        loss: Whose graph is kept.
        reductions: Where it is reduced over rows.
        rows: How many this rank has; with one, there is nothing to see.
    """
    known = [each for each in reductions if each.kind != "unknown" and each.shape] if rows > 1 else []
    found = []
    for each in known:
        with ExitStack() as stack:
            for other in reductions:
                if other.outer is not each.outer:
                    stack.callback(other.outer.register_prehook(_nothing).remove)
            found += [_reaches_other_rows(loss, _along_rows(each, rows), at, rows) for at in (0, -1)]
    return any(found)


def fixed_rows(loss: torch.Tensor, rows: int) -> list[float]:
    """Return the sums of what a loss multiplies its rows by that has as many rows and no gradient.

    Where ranks have different ones they are rows of the batch, such as those of a frozen encoder.
    """
    factors = (fixed_factor(node) for node in _nodes_above_outputs(loss.grad_fn))
    return [float(each.double().sum()) for each in factors if each is not None and rows in each.shape]


def _along_rows(reduction: BatchReduction, rows: int) -> Any:
    """Return the node of a reduction that reduces rows: the outer one, unless only the inner has them."""
    shape = reduced_shape(reduction.outer)
    return reduction.outer if len(shape) == len(reduction.shape) and shape[0] == rows else reduction.node


def _nothing(gradients: Any) -> Any:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def _reaches_other_rows(loss: torch.Tensor, reduction: Any, at: int, rows: int) -> bool:
    """Return whether the gradient of one element along the reduced rows reaches more than a row of an output."""
    below = {node for node, _ in reduction.next_functions if node is not None}
    outputs = [(edge, shape) for edge, shape in _outputs_below(loss.grad_fn) if edge.node not in below]
    if not outputs:
        return False
    with ExitStack() as stack:
        for node in below:
            stack.callback(node.register_prehook(_keep_one(at, reduced_shape(reduction)[0])).remove)
        edges = [edge for edge, _ in outputs]
        gradients = torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
    pairs = zip(gradients, outputs, strict=True)
    return any(grad is not None and _is_spread(grad, tuple(shape), rows) for grad, (_, shape) in pairs)


def _keep_one(at: int, length: int) -> Callable[[Any], Any]:
    """Return a hook that keeps one element of gradients along their first dimension."""

    def keep(gradients: Any) -> Any:
        return tuple(_one(gradient, at) if _is_along(gradient, length) else gradient for gradient in gradients)

    return keep


def _is_along(gradient: Any, length: int) -> bool:
    return isinstance(gradient, torch.Tensor) and gradient.dim() > 0 and gradient.size(0) == length


def _one(gradient: torch.Tensor, at: int) -> torch.Tensor:
    kept = torch.zeros_like(gradient)
    kept[at] = gradient[at]
    return kept


def _outputs_below(root: Any) -> Iterator[tuple[GradientEdge, Any]]:
    """Yield what models returned, where a graph first comes to it."""
    for node in _nodes_above_outputs(root):
        marks = noted(node).get(_KEY, {})
        yield from ((GradientEdge(node, number), shape) for number, shape in marks.items())


def _nodes_above_outputs(root: Any) -> Iterator[Any]:
    """Yield a graph's nodes down to those of what models returned."""
    waiting, seen = [root], set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not noted(node).get(_KEY):
            waiting += [below for below, _ in node.next_functions]


def _is_spread(gradient: torch.Tensor, shape: tuple[int, ...], rows: int) -> bool:
    """Return whether a gradient is in more than one row, whichever dimension the rows are in."""
    exact = [dim for dim, size in enumerate(shape) if size == rows]
    dims = exact or [dim for dim, size in enumerate(shape) if size and size % rows == 0]
    return bool(dims) and all(_used(gradient, dim) > shape[dim] // rows for dim in dims)


def _used(gradient: torch.Tensor, dim: int) -> int:
    """Return along how many places of a dimension a gradient is not zero."""
    others = [each for each in range(gradient.dim()) if each != dim]
    used = gradient.ne(0)
    return int((used.any(dim=others) if others else used).sum())
