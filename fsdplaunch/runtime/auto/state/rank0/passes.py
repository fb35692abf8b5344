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
from fsdplaunch.runtime.auto.state.rank0.full_passes import FullPasses
from fsdplaunch.runtime.auto.state.rank0.pulling import Rank0Saves, rank0_saves
from fsdplaunch.runtime.auto.state.saving_threads import failed, raise_failed
from fsdplaunch.runtime.script_line import calling_lines, script_line

_HINT = (
    "call the model on all ranks: take the evaluation out of `if rank == 0:`, give all ranks as many batches, and"
    " let rank 0 print; rank 0 alone can evaluate a model that FSDP2 shards and that is not compiled"
)

_OWN_DRAWS = (
    "call the model on all ranks alike: each rank draws random numbers of its own once training has begun, and may"
    " choose otherwise by them; launch with --keep-global-batch, with which all ranks draw the same"
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
        self.keeps_batch = hook_context.keeps_batch
        self.evaluated_at = -1
        self.training = True
        self.without_gradients: set[str] = set()
        self.full = FullPasses(name, hook_context)

    def begin(self, model: nn.Module) -> FullPasses | None:
        """Begin a pass.

        Returns:
            What ends it, where rank 0 makes it alone; None where all ranks make it, and it was counted.

        Raises:
            ShardingError: Only rank 0 makes it, and it trains, or cannot be made by one rank.
            CheckpointError: Only other ranks make it.
        """
        if failed:  # in another thread
            raise_failed()
        trains = model.training and torch.is_grad_enabled()
        if not self.turn(model) or not (trains or self._evaluates_further(model)):
            saves = rank0_saves()
            if saves is None:
                raise AssertionError
            return self.full.begin(model, saves)
        if self.full.fetched:
            self.full.forget()
        self.position.begin_pass()
        return None

    def is_alone_without_compiling(self, model: nn.Module) -> bool:
        """Return whether rank 0 makes the next pass alone, not compiled then; errors as `begin`. Collective."""
        self.full.eager = True
        self.full.eager = not (self.turn(model) and self._evaluates_further(model))
        return self.full.eager

    def _evaluates_further(self, model: nn.Module) -> bool:
        """Return whether all ranks make a further pass of an evaluation; a teacher makes one in each step."""
        if not self.ownership.ranked:
            return True
        if self.evaluated_at == self.position.steps and not self._made_by_all(model, "in evaluation"):
            return False
        self.evaluated_at = self.position.steps
        return True

    def turn(self, model: nn.Module) -> bool:
        """Return whether all ranks turn a model from training to evaluation, or back, where this one does.

        So that an evaluation that leaves the model as it is in training is seen, too, all ranks meet at each line
        of the script that computes without gradients for the first time.

        Returns:
            False where rank 0 alone does, and can compute alone.

        Raises:
            ShardingError: Only rank 0 does, and it trains, or cannot compute alone.
            CheckpointError: Only other ranks do.
        """
        if model.training != self.training:
            if not self._made_by_all(model, "in training" if model.training else "in evaluation"):
                return False
            self.training = model.training
        elif self.training and not torch.is_grad_enabled():
            return self._meets_without_gradients(model, calling_lines())
        return True

    def _meets_without_gradients(self, model: nn.Module, lines: str) -> bool:
        if lines not in self.without_gradients:
            called = lines.partition(", ")[2]
            if not self._made_by_all(model, "without gradients", f" ({called})" if called else ""):
                return False
            self.without_gradients.add(lines)
        return True

    def _made_by_all(self, model: nn.Module, how: str, called: str = "") -> bool:
        """Return whether all ranks make a pass; False where rank 0 makes it alone, as it can.

        In a script that has ranks of its own, others may be in a pass at another line, which is not this one.
        """
        saves, call = rank0_saves(), f"{self.name} {how}"
        if saves is None:
            return True
        has_ranks = self.ownership.ranked or not self.ownership.ours
        at = f" at {calling_lines()}" if has_ranks else called
        if saves.meet(call + at, _HINT if has_ranks or self.keeps_batch else _OWN_DRAWS):
            return True
        if not self.full.can_be(model):
            raise _alone(saves, call, _HINT)
        return False


_passes: "weakref.WeakKeyDictionary[nn.Module, Passes]" = weakref.WeakKeyDictionary()


def note_passes(model: nn.Module, passes: Passes) -> None:
    """Remember who counts a model's passes."""
    _passes[model] = passes


def turns_on_all_ranks(model: nn.Module) -> bool:
    """Do what a model's next pass begins with, before something else that all ranks do; see `Passes.turn`."""
    return model not in _passes or _passes[model].turn(model)


def is_alone_without_compiling(model: nn.Module) -> bool:
    """Return whether rank 0 makes a model's next pass alone, for which the compiled one is not to be called."""
    return model in _passes and _passes[model].is_alone_without_compiling(model)


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
        raise _alone(saves, call, hint)


def _alone(saves: Rank0Saves, call: str, hint: str) -> ShardingError:
    rank, where = next(iter(saves.where.items()))
    return ShardingError(f"{script_line()} calls {call} on rank 0 only: rank {rank} is at {where}", hint=hint)


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
