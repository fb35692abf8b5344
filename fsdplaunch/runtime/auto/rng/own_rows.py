"""Which rows of what is drawn for all ranks are this rank's own."""

from itertools import accumulate

import torch

from fsdplaunch.runtime.auto.context import HookContext


def own_rows(hook_context: HookContext, parts: tuple[int, ...]) -> slice | list[int]:
    """Return the places of this rank's rows, of each share where several are one below the other.

    Args:
        hook_context: This worker's.
        parts: How many rows each share has on a rank.
    """
    ranks, rank = hook_context.data.size, hook_context.data.rank
    begins = [0, *accumulate(part * ranks for part in parts)]
    spans = [(first + rank * part, part) for first, part in zip(begins, parts, strict=False)]
    if len(spans) == 1:
        return slice(spans[0][0], sum(spans[0]))
    return [row for first, part in spans for row in range(first, first + part)]


def own_part(
    hook_context: HookContext, drawn: torch.Tensor, dim: int, parts: tuple[int, ...] = ()
) -> torch.Tensor:
    """Return this rank's rows of a tensor that was drawn for all.

    Args:
        hook_context: This worker's.
        drawn: The tensor.
        dim: Where its rows are.
        parts: How many rows each share in it has on a rank; what is known of the batch's by default.
    """
    rows = drawn.size(dim) // hook_context.data.size
    own = own_rows(hook_context, parts or (hook_context.batches.parts_of(rows) if dim == 0 else (rows,)))
    if isinstance(own, slice):
        return drawn.narrow(dim, own.start, own.stop - own.start)
    return drawn.index_select(dim, torch.tensor(own, device=drawn.device))
