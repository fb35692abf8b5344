"""Find out whether a loss compares rows of the batch with each other, as losses with in-batch negatives do.

Needed because each rank compares its own rows only: what the rows of two ranks have to do with each other is in no
rank's loss. Seen by gradients: those of one row's loss must reach no other row of what the model returned.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdplaunch.runtime.auto.losses.graph import BatchReduction
from fsdplaunch.runtime.auto.model.gathered_view import gathering_again
from fsdplaunch.runtime.torch_internals.graphs.graph_nodes import (
    computed_dims,
    fixed_factor,
    moves_rows,
    reduced_shape,
)
from fsdplaunch.runtime.torch_internals.graphs.node_kinds import (
    ALONG,
    ELEMENTWISE,
    LOSSES,
    has_rows,
    kind_of,
    noted,
)
from fsdplaunch.runtime.torch_internals.tensors import tree_leaves

_KEY, _INNER = "fsdplaunch_output", "fsdplaunch_inner_output"
Output = tuple[GradientEdge, Any]
"""Where a module's output is in a graph, and its shape."""
_MOST_NODES = 5000


def mark_outputs(output: Any) -> None:
    """Let the graph of what a model returned remember where it is."""
    for value in tree_leaves(output):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            edge = get_gradient_edge(value)
            noted(edge.node).setdefault(_KEY, {})[edge.output_nr] = value.shape


def is_of_model(node: Any) -> bool:
    """Return whether a graph's node is of what a model returned, or of a parameter."""
    return bool(noted(node).get(_KEY)) or hasattr(node, "variable")


def mark_inner_outputs(model: nn.Module) -> list[RemovableHandle]:
    """Let graphs remember what the innermost modules return too, for a loss that the model itself computes.

    Returns:
        Handles that end it.
    """
    inner = [each for each in model.modules() if each is not model and _is_innermost(each)]
    return [module.register_forward_hook(_mark_inner) for module in inner]


def _is_innermost(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False))


def _mark_inner(_module: nn.Module, _args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for value in tree_leaves(output):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None and value.dim():
            edge = get_gradient_edge(value)
            total = float(value.detach().double().sum())
            noted(edge.node).setdefault(_INNER, {})[edge.output_nr] = (value.shape, total)


def outputs_of_models(loss: torch.Tensor) -> list[Output]:
    """Return what models returned, where a loss's graph first comes to it."""
    found = ((node, noted(node).get(_KEY, {})) for node in _nodes_above(loss.grad_fn, _KEY))
    return [(GradientEdge(node, number), shape) for node, marks in found for number, shape in marks.items()]


def inner_outputs(loss: torch.Tensor, rows: int) -> list[tuple[Output, float]]:
    """Return what innermost modules returned, where a loss's graph first comes to it, with the sums of it.

    Args:
        loss: Whose graph is kept.
        rows: How many this rank has. What has them twice is a table of rows by rows, and is gone through.
    """
    skipped = (rows, rows)
    found = ((node, noted(node).get(_INNER, {})) for node in _nodes_above(loss.grad_fn, _INNER, skipped))
    return [
        ((GradientEdge(node, number), shape), total)
        for node, marks in found
        for number, (shape, total) in marks.items()
        if tuple(shape[:2]) != skipped
    ]


def compares_rows(
    loss: torch.Tensor, reductions: Sequence[BatchReduction], rows: int, outputs: Sequence[Output]
) -> bool:
    """Return whether a row's loss depends on other rows. All ranks call it, for models may gather parameters.

    Args:
        loss: Whose graph is kept.
        reductions: Where it is reduced over rows.
        rows: How many this rank has; with one, there is nothing to see.
        outputs: Of modules, in which the rows are looked for.
    """
    known = [each for each in reductions if each.kind != "unknown" and each.shape] if rows > 1 else []
    found = []
    for each in known:
        with ExitStack() as stack:
            for other in reductions:
                if other.outer is not each.outer:
                    stack.callback(other.outer.register_prehook(_nothing).remove)
            along = _along_rows(each, rows)
            found += [_reaches_other_rows(loss, along, at, rows, outputs) for at in (0, -1)]
    return any(found)


def penalises_on_meshes(loss: torch.Tensor) -> bool:
    """Return whether a loss has parameters in it, beside models' outputs, that lie on meshes of several axes.

    Args:
        loss: Whose graph is read.
    """
    variables = (getattr(node, "variable", None) for node in _nodes_above(loss.grad_fn, _KEY))
    return any(isinstance(each, DTensor) and each.device_mesh.ndim > 1 for each in variables)


def may_compare_rows(loss: torch.Tensor, reductions: Sequence[BatchReduction], *, inside: bool) -> bool:
    """Return whether anything between modules' outputs and a loss is not known to look at each row by itself.

    Args:
        loss: Whose graph is read.
        reductions: Where it is reduced over rows.
        inside: Whether outputs of innermost modules are marked, not those of whole models only.
    """
    key = _INNER if inside else _KEY
    known = {node for each in reductions for node in (each.node, each.outer)}
    nodes = (node for node in _nodes_above(loss.grad_fn, key) if not noted(node).get(key) and node not in known)
    return not all(is_by_row(node) for node in nodes)


def fixed_rows(loss: torch.Tensor, rows: int) -> list[float]:
    """Return the sums of what a loss multiplies its rows by that has as many rows and no gradient.

    Where ranks have different ones they are rows of the batch, such as those of a frozen encoder. What the script
    multiplies by parameters outside of the model is none of them.
    """
    factors = (fixed_factor(node) for node in _nodes_above(loss.grad_fn, _KEY) if not has_rows(node))
    return [float(each.double().sum()) for each in factors if each is not None and rows in each.shape]


def _along_rows(reduction: BatchReduction, rows: int) -> Any:
    """Return the node of a reduction that reduces rows: the outer one, unless only the inner has them."""
    shape = reduced_shape(reduction.outer)
    return reduction.outer if len(shape) == len(reduction.shape) and shape[0] == rows else reduction.node


def _nothing(gradients: Any) -> Any:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def _reaches_other_rows(loss: torch.Tensor, reduction: Any, at: int, rows: int, outputs: Sequence[Output]) -> bool:
    """Return whether the gradient of one element along the reduced rows reaches more than a row of an output."""
    below = {node for node, _ in reduction.next_functions if node is not None}
    others = [(edge, shape) for edge, shape in outputs if edge.node not in below]
    if not others:
        return False
    with ExitStack() as stack:
        for node in below:
            stack.callback(node.register_prehook(_keep_one(at, reduced_shape(reduction), rows)).remove)
        for node in {edge.node for edge, _ in outputs}:
            stack.callback(node.register_prehook(_nothing).remove)  # what one output is made of is its model's own
        edges = [edge for edge, _ in others]
        stack.enter_context(gathering_again())
        gradients = torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
    pairs = zip(gradients, others, strict=True)
    return any(grad is not None and _is_spread(grad, tuple(shape), rows) for grad, (_, shape) in pairs)


def _keep_one(at: int, shape: Sequence[int], rows: int) -> Callable[[Any], Any]:
    """Return a hook that keeps one element of gradients along the dimension of the rows; the first by default."""
    dim = shape.index(rows) if rows in shape else 0

    def keep(gradients: Any) -> Any:
        return tuple(
            _one(gradient, at, dim) if _is_along(gradient, shape[dim], dim) else gradient for gradient in gradients
        )

    return keep


def _is_along(gradient: Any, length: int, dim: int) -> bool:
    return isinstance(gradient, torch.Tensor) and gradient.dim() > dim and gradient.size(dim) == length


def _one(gradient: torch.Tensor, at: int, dim: int) -> torch.Tensor:
    kept = torch.zeros_like(gradient)
    kept.select(dim, at).copy_(gradient.select(dim, at))
    return kept


def _nodes_above(root: Any, key: str, skipped: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield a graph's nodes down to those of what modules returned, which are marked under a key.

    Args:
        root: The loss's.
        key: Of the marks.
        skipped: The first two sizes of what is gone through all the same.
    """
    waiting, seen = [root], set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        marks = noted(node).get(key, {}).values()
        if not any(not skipped or tuple(mark[0][:2]) != skipped for mark in marks):
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


def is_by_row(node: Any) -> bool:
    """Return whether an operation computes each row of its result from the same row of what it is given."""
    name = kind_of(node)
    if name in ALONG:
        return 0 not in computed_dims(node)
    return name == "AccumulateGrad" or (name in ELEMENTWISE | LOSSES and not moves_rows(node))
