"""Tell whether a loss compares rows of the batch with each other, of which each rank has its own."""

from itertools import compress
from typing import Any

import torch

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.losses.graph import BatchReduction
from fsdplaunch.runtime.auto.losses.mixing_models import mixing_operation
from fsdplaunch.runtime.auto.losses.row_mixing import (
    compares_rows,
    fixed_rows,
    inner_outputs,
    may_compare_rows,
    outputs_of_models,
    penalises_on_meshes,
)
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.torch_internals.graphs.graph_nodes import takes_partial_passes


def tell_mixing(
    hook_context: HookContext, line: str, loss: torch.Tensor, found: list[BatchReduction], *, known: bool
) -> None:
    """Print whether the loss is one of all rows together, of which this rank has a part. Collective.

    Args:
        hook_context: This worker's.
        line: Of the script, that calls backward.
        loss: Whose graph is kept.
        found: Where it is reduced over rows.
        known: Whether it is known, on all ranks, to compare none between what models returned and the loss.
    """
    rows = hook_context.batches.current
    found = _looked_at(found)
    hidden = penalises_on_meshes(loss)
    seen = takes_partial_passes(penalised_meshes=hidden)
    mixes = seen and not known and compares_rows(loss, found, rows, outputs_of_models(loss))
    mixes = (seen and _mixes_inside(hook_context, loss, found, rows)) or mixes
    facts = from_all((mixes, fixed_rows(loss, rows)))
    if any(fact != (False, facts[0][1]) for fact in facts):
        messages.say_unequal(
            f"{line}: the loss compares rows of the batch with each other: each rank compares its own {rows}"
            " only, which is not what one process computes"
        )
    elif hidden and rows > 1 and may_compare_rows(loss, found, inside=False):
        messages.say(
            f"{line}: whether the loss compares rows of the batch with each other cannot be seen where a mesh"
            " has several axes and parameters are in the loss; one that does is not that of one process"
        )
    elif rows == 1 and may_compare_rows(loss, found, inside=bool(hook_context.inner_marks)):
        messages.say_unequal(
            f"{line}: each rank has one row of the batch: a loss that compares rows with each other would not"
            " be that of one process, and with one row it cannot be seen"
        )


def _mixes_inside(hook_context: HookContext, loss: torch.Tensor, found: list[BatchReduction], rows: int) -> bool:
    """Return whether a model compares rows in its own forward. Collective.

    What its modules returned is of rows where ranks have different ones: positions and classes are alike.
    """
    inner = inner_outputs(loss, rows) if hook_context.inner_marks else []
    totals = from_all([total for _, total in inner])
    if any(len(each) != len(inner) for each in totals):
        return False
    differ = [len(set(each)) > 1 for each in zip(*totals, strict=True)]
    outputs = list(compress((output for output, _ in inner), differ))
    below = mixing_operation((edge.node for edge, _ in outputs), rows, _nodes_of(found)) if rows > 1 else ""
    return compares_rows(loss, found, rows, outputs) or bool(below)


def _looked_at(found: list[BatchReduction]) -> list[BatchReduction]:
    """Return the reductions that rows can be looked for in on all ranks. Collective.

    Each is looked at by gradients, for which models may gather parameters: all ranks do so, or none. What a rank
    has as many of as something else, by chance, is a reduction of an unknown kind there.
    """
    known = from_all([each.kind != "unknown" and bool(each.shape) for each in found])
    if any(len(each) != len(found) for each in known):
        return []
    return list(compress(found, map(all, zip(*known, strict=True))))


def _nodes_of(found: list[BatchReduction]) -> list[Any]:
    return [node for each in found for node in (each.node, each.outer)]
