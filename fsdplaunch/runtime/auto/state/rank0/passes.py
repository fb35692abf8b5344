"""Notice passes of a sharded model that only some ranks make: they would take part in other ranks' collectives.

Looked at where a model turns from training to evaluation and back, and where it first computes without gradients,
which is where ranks part; other passes only count. Where a script has ranks of its own, they may also have unequal
numbers of rows to evaluate, as DistributedDataParallel lets them: there each further pass is looked at.
"""

import weakref

import torch
from torch import nn

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.script_line import calling_lines, script_line
from fsdplaunch.runtime.auto.state.rank0.pulling import rank0_saves

_HINT = (
    "call the model on all ranks: take the evaluation out of `if rank == 0:`, give all ranks as many batches, and"
    " let rank 0 print"
)


class Passes:
    """The passes of one model.

    Args:
        name: The model's class.
        hook_context: This worker's.
    """

    def __init__(self, name: str, hook_context: HookContext) -> None:
        self.name = name
        self.position = hook_context.position
        self.ownership = hook_context.ownership
        self.evaluated_at = -1
        self.training = True
        self.without_gradients: set[str] = set()

    def begin(self, model: nn.Module) -> None:
        """Count a pass that begins; errors as `turn`."""
        self.turn(model)
        if self.ownership.ranked and not (model.training and torch.is_grad_enabled()):
            self._evaluate_further()
        self.position.begin_pass()

    def _evaluate_further(self) -> None:
        """Check that all ranks make a further pass of an evaluation; a teacher makes one in each step.

        Raises:
            ShardingError: Only rank 0 does.
            CheckpointError: Only other ranks do.
        """
        if self.evaluated_at == self.position.steps:
            check_all_ranks(f"{self.name} in evaluation")
        self.evaluated_at = self.position.steps

    def turn(self, model: nn.Module) -> None:
        """Check that all ranks turn a model from training to evaluation, or back, where this one does.

        So that an evaluation that leaves the model as it is in training is seen, too, all ranks meet at each line
        of the script that computes without gradients for the first time.

        Raises:
            ShardingError: Only rank 0 does.
            CheckpointError: Only other ranks do.
        """
        if model.training != self.training:
            check_all_ranks(f"{self.name} in {'training' if model.training else 'evaluation'}")
            self.training = model.training
        elif self.training and not torch.is_grad_enabled():
            self._meet_without_gradients(calling_lines())

    def _meet_without_gradients(self, lines: str) -> None:
        if lines not in self.without_gradients:
            called = lines.partition(", ")[2]
            check_all_ranks(f"{self.name} without gradients" + (f" ({called})" if called else ""))
            self.without_gradients.add(lines)


_passes: "weakref.WeakKeyDictionary[nn.Module, Passes]" = weakref.WeakKeyDictionary()


def note_passes(model: nn.Module, passes: Passes) -> None:
    """Remember who counts a model's passes."""
    _passes[model] = passes


def check_turn(model: nn.Module) -> None:
    """Do what a model's next pass begins with, before something else that all ranks do; see `Passes.turn`."""
    if model in _passes:
        _passes[model].turn(model)


def check_all_ranks(call: str, hint: str = _HINT) -> None:
    """Check that every rank makes a call; those that are late are waited for.

    Args:
        call: What it is, the same on all ranks.
        hint: What to do where only some make it.

    Raises:
        ShardingError: Only rank 0 makes it.
        CheckpointError: Only other ranks make it.
    """
    saves = rank0_saves()
    if saves is not None and not saves.meet(call, hint):
        rank, where = next(iter(saves.where.items()))
        msg = f"{script_line()} calls {call} on rank 0 only: rank {rank} is at {where}"
        raise ShardingError(msg, hint=hint)


def meet_rank0(call: str) -> None:
    """Wait until rank 0 makes a call that changes shards, too: until then it may still be saving them.

    Rank 0 waits for none that does not come: it may exchange weights for a save, and back.

    Args:
        call: What it is, the same on all ranks.

    Raises:
        CheckpointError: Only other ranks make it.
    """
    saves = rank0_saves()
    if saves is not None:
        saves.meet(call, "make it on all ranks, decided by a number that all of them have alike")
