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
from fsdplaunch.runtime.torch_internals.node_kinds import MOST_NODES, kind_of

_IS_WHOLE = "_fsdplaunch_is_whole"
_CLOSE = 1e-9


class WholeValue:
    """The value of one loss, on its way. Collective.

    Args:
        loss: Of one element, which ranks have computed of their shares.
        factor: By which this rank's value counts in the mean over ranks; None where that is not known.
        group: Of all ranks, for tensors on the CPU.
    """

    def __init__(self, loss: torch.Tensor, factor: float | None, group: Any) -> None:
        self._loss = loss
        value = loss.detach().reshape(()).double()
        own = value * factor if factor else torch.zeros_like(value)
        self._sent = torch.stack([own, torch.full_like(own, factor is not None)])
        group = group if own.device.type == "cpu" else None
        self._work: Any = dist.all_reduce(self._sent, group=group, async_op=True)

    def put(self) -> None:
        """Give the loss its value, if all ranks know by what theirs count; no device is waited for."""
        self._work.wait()
        ranks = dist.get_world_size()
        known = self._sent[1] == ranks
        own = self._loss.data
        own.copy_(torch.where(known, (self._sent[0] / ranks).to(own.dtype), own))
        vars(self._loss)[_IS_WHOLE] = known


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
