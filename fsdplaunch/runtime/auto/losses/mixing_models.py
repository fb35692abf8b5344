"""Find out whether a model compares rows of the batch in its own forward, as a batch norm written by hand does.

Needed because each rank compares its own rows only. Seen in the graph below what the model returned, by reductions
along the rows: nothing is computed for it, so that models need not gather their parameters once more.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from fsdplaunch.runtime.torch_internals.graphs.graph_nodes import along_dims, multiplied_shapes, operand_shape
from fsdplaunch.runtime.torch_internals.graphs.node_kinds import ALONG, is_of_parameters, kind_of

_MIXERS = (ALONG - {"Gather"}) | {"VarMean", "StdMean"}
_RESHAPES = ("View", "UnsafeView", "ReshapeAlias")
_OVER_ALL_RANKS = ("_SumOverRanks", "_AllReduce")
_MOST_NODES = 20000


def mixing_operation(outputs: Iterable[Any], rows: int, known: Iterable[Any] = ()) -> str:
    """Return the name of an operation on several rows below what a model's modules returned, or "".

    What is exchanged with the other ranks, as batch norm's statistics are, is over all rows.

    Args:
        outputs: The nodes of what they returned.
        rows: How many this rank has.
        known: The reductions of the loss.
    """
    terms = set(known)
    nodes = (node for node in _below(outputs) if node not in terms)
    return next((kind_of(node) for node in nodes if _mixes(node, rows) and not is_of_parameters(node)), "")


def _below(outputs: Iterable[Any]) -> Iterator[Any]:
    waiting, seen = list(outputs), set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen or kind_of(node) in _OVER_ALL_RANKS:
            continue
        seen.add(node)
        yield node
        waiting += [below for below, _ in node.next_functions]


def _mixes(node: Any, rows: int) -> bool:
    name = kind_of(node)
    return (name in _MIXERS and _is_along_rows(node, rows)) or (name == "Mm" and _multiplies_rows(node, rows))


def _is_along_rows(node: Any, rows: int) -> bool:
    """Return whether a reduction's dimensions are of rows: one of them, several that rows were taken apart to."""
    shape = operand_shape(node)
    dims = along_dims(node, len(shape))
    split = next((end for end in range(1, len(shape) + 1) if math.prod(shape[:end]) == rows), 0)
    if split:
        return any(dim < split and shape[dim] > 1 for dim in dims)
    return 0 in dims and _has_flattened(node, rows)


def _has_flattened(node: Any, rows: int) -> bool:
    """Return whether a reduction is of rows that have just been put together with another dimension."""
    below = node.next_functions[0][0]
    return kind_of(below) in _RESHAPES and operand_shape(below)[:1] == (rows,)


def _multiplies_rows(node: Any, rows: int) -> bool:
    """Return whether a product of matrices, of two values that are computed, is of rows by rows or over them."""
    first, second = multiplied_shapes(node)
    by_rows = first[:1] == second[1:] == (rows,) or first[1:] == second[:1] == (rows,)
    return by_rows and all(below is not None and not _is_parameter(below) for below, _ in node.next_functions)


def _is_parameter(node: Any) -> bool:
    return kind_of(node) == "AccumulateGrad" or is_of_parameters(node)
