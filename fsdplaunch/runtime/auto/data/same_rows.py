"""Tell when all ranks compute the same rows, because no loader of the script divides them."""

import torch
import torch.distributed as dist

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.script_line import script_line

_UNTIL = ", until rows are shuffled again, which each rank does by random numbers of its own"
"""What is added where ranks draw for themselves: the first pass over the data was shuffled before they did."""


class SameRows:
    """The check of one worker, made at its first backward passes.

    Where ranks draw for themselves they do so from the first pass on: rows that are drawn differ from the second.
    """

    def __init__(self, hook_context: HookContext) -> None:
        self.hook_context = hook_context
        if hook_context.data.size == 1:  # all split layers together, and are to have the same
            hook_context.batches.compares = False
        self.left = 1 if hook_context.keeps_batch else 2

    def check(self) -> None:
        """Compare over ranks what the last pass was given, and print once that it is the same. Collective."""
        batches = self.hook_context.batches
        if not batches.compares or batches.fingerprint is None or not batches.await_backward():
            return  # one rank's own model may be trained by more backward passes than the others make
        self.left -= 1
        if batches.divided or not self.left:
            batches.compares = False
        if not batches.compares and not batches.divided:
            self._compare(batches.fingerprint)

    def _compare(self, own: float) -> None:
        ranks = self.hook_context.size
        extremes = torch.tensor([own, -own], dtype=torch.float64, device=self.hook_context.device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        why, instead = self._cause()
        scripts = self.hook_context.keeps_batch or self.hook_context.ownership.ranked
        until = "" if scripts else _UNTIL
        if extremes[0] == -extremes[1]:
            messages.say(
                f"{script_line()}: all {ranks} ranks compute the same rows, for {why}: "
                f"this is the training of one process, and as slow{until}\n"
                f"  try  read batches from {instead}"
            )

    def _cause(self) -> tuple[str, str]:
        """Return why the rows are the same, and from what to read them instead."""
        if self.hook_context.ownership.ranked:
            instead = "DataLoader(dataset, sampler=DistributedSampler(dataset)), or take rows by rank"
            return "the script divides them by no DistributedSampler", instead
        kind = self.hook_context.batches.read_by
        if kind:
            return kind, "torch's DataLoader, in batches that can be divided"
        return "no DataLoader divides them", "a DataLoader over the tensors (TensorDataset)"
