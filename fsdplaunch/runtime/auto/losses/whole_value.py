"""Give a loss the value of one process when its backward has run, where each rank has a share of the batch.

Scripts decide by `loss.item()`: when to lower the learning rate, when to stop, which weights are the best so far.
By the losses of their own shares, ranks would decide differently.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.losses.graph import BatchReduction
from fsdplaunch.runtime.torch_internals.graphs.node_kinds import MOST_NODES, kind_of

_IS_WHOLE = "_fsdplaunch_is_whole"
_CLOSE = 1e-9


class WholeValue:
    """The value of one loss, and of what the script holds of it, on their way. Collective.

    Args:
        values: A loss of one element and its parts, which ranks have computed of their shares; each with the
            factor by which this rank's value counts in the mean over ranks, None where that is not known. As many
            on all ranks, of the same shapes.
        group: Of all ranks, for tensors on the CPU.
    """

    def __init__(self, values: Sequence[tuple[torch.Tensor, float | None]], group: Any) -> None:
        self._values = [value for value, _ in values]
        device = self._values[0].device
        rows = [_weighted(value, factor).to(device) for value, factor in values]
        self._sent = torch.cat(rows, dim=1)
        self._work: Any = dist.all_reduce(self._sent, group=group if device.type == "cpu" else None, async_op=True)

    def put(self) -> None:
        """Give each its value, if all ranks know by what theirs count; no device is waited for."""
        self._work.wait()
        ranks = dist.get_world_size()
        sizes = [value.numel() for value in self._values]
        for value, (total, knowing) in zip(self._values, self._sent.split(sizes, dim=1), strict=True):
            known, own = (knowing == ranks).view(value.shape), value.data
            whole = (total / ranks).view(value.shape)
            own.copy_(torch.where(known.to(own.device), whole.to(own.device, own.dtype), own))
            vars(value)[_IS_WHOLE] = known.all()


def _weighted(value: torch.Tensor, factor: float | None) -> torch.Tensor:
    """Return a value's elements as they count in the mean over ranks, and below them whether that is known."""
    elements = value.detach().reshape(-1).double()
    own = elements * factor if factor else torch.zeros_like(elements)
    return torch.stack([own, torch.full_like(own, factor is not None)])


def has_one_value(loss: torch.Tensor) -> bool:
    """Return whether a loss is one number, on this rank as a whole."""
    return loss.numel() == 1 and not isinstance(loss, DTensor)


def is_whole(loss: Any) -> bool:
    """Return whether a loss has the value of one process by now; the same on all ranks."""
    return bool(getattr(loss, _IS_WHOLE, False))


def common_factor(factors: Sequence[float | None]) -> float | None:
    """Return the factor that all terms of a loss have; None where they differ, or one is not known."""
    known = [factor for factor in factors if factor is not None]
    if not known or len(known) < len(factors) or max(known) - min(known) > _CLOSE:
        return None
    return known[0]


def has_penalty(loss: torch.Tensor, found: Sequence[BatchReduction]) -> bool:
    """Return whether a loss has parameters beside what is below its reductions, alike on all ranks.

    Args:
        loss: This rank's.
        found: Where it is reduced over the rank's rows.
    """
    waiting, seen = [loss.grad_fn], {each.node for each in found}
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if kind_of(node) == "AccumulateGrad":
            return True
        seen.add(node)
        waiting += [below for below, _ in node.next_functions]
    return False
