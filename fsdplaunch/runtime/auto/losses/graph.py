"""Find in a loss's graph where it is reduced over the rows of a batch, and whether that is by a sum or by a mean.

Needed because gradients are averaged over ranks: that gives the gradient of one process for a mean over the batch,
and one N-th of it for a sum. The graph is read from the loss down to what the model computed.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdplaunch.runtime.auto.losses.amounts import Amount, SumOverRows, scales_of_mean, sum_over_rows, void_factor
from fsdplaunch.runtime.torch_internals.graphs.graph_nodes import (
    Factor,
    loss_reduction,
    reduced_dims,
    reduced_elements,
    reduced_shape,
    scale_factor,
    total_weight,
)
from fsdplaunch.runtime.torch_internals.graphs.node_kinds import (
    ELEMENTWISE,
    LINEAR,
    LOSSES,
    MOST_NODES,
    PLAIN,
    PRODUCTS,
    is_of_parameters,
    kind_of,
)


@dataclass(frozen=True, slots=True)
class BatchReduction:
    """A place where a loss is reduced over rows.

    Attributes:
        node: Of the graph; its gradient is that of the reduction's result.
        outer: The node above it that the search found first, or itself.
        kind: "sum"; "mean"; "unknown" for what is neither.
        shape: Of what was reduced.
        amounts: What it was divided by.
        name: Of the operation.
        guessed: Whether it is taken for a mean since it is divided by a number 1, and this rank has one row.
    """

    node: Any
    outer: Any
    kind: str
    shape: tuple[int, ...]
    amounts: tuple[Amount, ...]
    name: str
    guessed: bool = False


class LossGraph(NamedTuple):
    """What was read of a graph.

    Attributes:
        reductions: Where the loss is reduced over rows.
        nodes: Those from the loss down to there.
    """

    reductions: list[BatchReduction]
    nodes: list[Any]


def read_graph(root: Any, sizes: Collection[int], ranks: int) -> LossGraph:
    """Return where a loss is reduced over the rows that this rank has, and what it is computed by from there.

    Args:
        root: The loss's `grad_fn`.
        sizes: How many rows this rank's shares of the batches have.
        ranks: How many ranks share a batch.
    """
    search = _Search(sizes, ranks)
    return LossGraph(list(search.below(root, ())), list(search.seen))


class _Search:
    """One reading of a graph."""

    def __init__(self, sizes: Collection[int], ranks: int) -> None:
        self.sizes, self.ranks = frozenset(sizes), ranks
        self.seen: dict[Any, None] = {}

    def below(self, root: Any, factors: tuple[Factor, ...]) -> Iterator[BatchReduction]:
        """Yield the reductions at and below a node whose value is multiplied by these until it is the loss."""
        waiting = [(root, factors)]
        while waiting and len(self.seen) < MOST_NODES:
            node, scales = waiting.pop()
            if node is None or node in self.seen or kind_of(node) == "AccumulateGrad":
                continue
            self.seen[node] = None
            name = kind_of(node)
            if name in PRODUCTS and _mixes_operands(node):
                yield _unknown(node, name)
            elif name in LINEAR or (
                name in PLAIN and (self._is_of_one(node) or _only_collects(node) or self._is_of_reduced(node))
            ):
                factor = scale_factor(node)
                more = scales if factor is None else (*scales, factor)
                waiting += [(below, more) for below, _ in node.next_functions]
            elif not is_of_parameters(node):
                found = self._reduction(node, name, scales)
                if found.kind != "unknown" or all(factor.value != 0 for factor in scales):
                    yield found  # `0 * scores[0]` lets all parameters have gradients, whatever it is

    def _is_of_one(self, node: Any) -> bool:
        """Return whether a sum or a mean is of one number that was reduced before, which it does not change.

        Not of one row, of a rank whose rows leave it no more.
        """
        below = node.next_functions[0][0] if node.next_functions else None
        reduced = below is not None and kind_of(below) in LOSSES | set(PLAIN)
        return reduced and 1 not in self.sizes and not reduced_shape(node)

    def _is_of_reduced(self, node: Any) -> bool:
        """Return whether a sum is of losses that are reduced already, such as a loss times each weight of a model.

        Not a mean, which divides them by how many it is over.
        """
        shape = reduced_shape(node)
        if kind_of(node) != "Sum" or not shape or shape[0] in self.sizes:
            return False
        waiting, seen, found = [node.next_functions[0][0]], set[Any](), False
        while waiting and len(seen) < MOST_NODES:
            below = waiting.pop()
            if below is None or below in seen or kind_of(below) == "AccumulateGrad" or is_of_parameters(below):
                continue
            seen.add(below)
            name = kind_of(below)
            if self._reduces_rows(below, name):
                found = True
            elif name in LINEAR and not (name in PRODUCTS and _mixes_operands(below)):
                waiting += [each for each, _ in below.next_functions]
            else:
                return False
        return found

    def _reduces_rows(self, node: Any, name: str) -> bool:
        shape = reduced_shape(node)
        reduces = name in PLAIN or (name in LOSSES and loss_reduction(node) > 0)
        return reduces and bool(shape) and shape[0] in self.sizes and 0 in reduced_dims(node)

    def _reduction(self, node: Any, name: str, factors: tuple[Factor, ...]) -> BatchReduction:
        how = {"Sum": 2, "Mean": 1}.get(name, loss_reduction(node) if name in LOSSES else 0)
        if not how:
            return _unknown(node, name)
        inner, bend = self._over_rows_below(node)
        if bend and (reduced_shape(node) or (0,))[0] not in self.sizes:
            return _unknown(node, bend)
        chosen = node if inner is None or name in LOSSES else inner
        name = kind_of(chosen)
        shape = reduced_shape(chosen)
        if name == "Mean" or (name in LOSSES and how == 1):
            multiplied = any(factor.value in self.sizes and factor.value > 1 for factor in factors)
            kind, weight = "unknown" if multiplied else "mean", total_weight(chosen)
            amounts: tuple[Amount, ...] = (
                Amount(reduced_elements(chosen) if weight is None else weight, "weight"),
                *scales_of_mean(factors),
            )
            found = SumOverRows(kind, amounts)
        else:
            found = sum_over_rows(chosen, shape, (*factors, *void_factor(chosen)), self.sizes, self.ranks)
        return BatchReduction(chosen, node, found.kind, shape, found.amounts, name, guessed=found.guessed)

    def _over_rows_below(self, node: Any) -> tuple[Any, str]:
        """Return a reduction over the first dimension below this one, which then is over what is left of a row.

        With it comes the name of an operation between them that is not linear, or "": a sum of squares of means
        over the rows is none of the rows' own.
        """
        bend = kind_of(node) if kind_of(node) in LOSSES else ""
        waiting: list[tuple[Any, str]] = [(below, bend) for below, _ in node.next_functions]
        seen: set[Any] = set()
        found: tuple[Any, str] = (None, "")
        while waiting and len(seen) < MOST_NODES:
            below, bend = waiting.pop()
            name = kind_of(below) if below is not None else ""
            if below in seen or name not in ELEMENTWISE | set(PLAIN):
                continue
            seen.add(below)
            if self._leaves_rest_of_row(below, name):
                found = (below, bend or found[1])
            bent = name not in LINEAR | set(PLAIN) or (name in PRODUCTS and _mixes_operands(below))
            waiting += [(each, name if bent else bend) for each, _ in below.next_functions]
        return found

    def _leaves_rest_of_row(self, node: Any, name: str) -> bool:
        shape, dims = reduced_shape(node), reduced_dims(node)
        return name in PLAIN and bool(shape) and shape[0] in self.sizes and 0 in dims and len(dims) < len(shape)


def _unknown(node: Any, name: str) -> BatchReduction:
    return BatchReduction(node, node, "unknown", (), (), name)


def _mixes_operands(node: Any) -> bool:
    """Return whether a product or a quotient is of two values of the batch, as a Dice loss is, or by one."""
    operands = [below for below, _ in node.next_functions]
    moving = [
        each is not None and kind_of(each) != "AccumulateGrad" and not is_of_parameters(each) for each in operands
    ]
    return sum(moving) > 1 or (kind_of(node) == "Div" and moving[1:] == [True])


def _only_collects(node: Any) -> bool:
    """Return whether a sum or a mean is over numbers that the script put together, such as a loss of each step."""
    below = node.next_functions[0][0] if node.next_functions else None
    shape = reduced_shape(node)
    return (
        below is not None
        and kind_of(below) in ("Stack", "Cat")
        and len(shape) == 1
        and shape[0] == len(below.next_functions)
    )
