"""Tell of two optimizers that both train the same shards, which a script may not have meant.

A script that leaves out by `id()` or `is` what the first has compares shards with what it noted before the first
was built, and gives all of them to the second. One that builds its optimizer anew, after unfreezing or for a
restart, steps the second only.
"""

from typing import Any

from torch.optim import Optimizer

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.script_line import script_line


def tell_of_others(optimizer: Optimizer, hook_context: HookContext) -> None:
    """Print, once both have stepped, that an optimizer has parameters of one at which shards were exchanged.

    Args:
        optimizer: With its groups.
        hook_context: This worker's.
    """
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for other, line in hook_context.exchanging.items():
        shared = sum(id(param) in own for group in other.param_groups for param in group["params"])
        key = f"shared {id(optimizer)} {id(other)}"
        if shared and other is not optimizer and key not in hook_context.printed:
            hook_context.printed.add(key)
            message = (
                f"{script_line()}: {type(optimizer).__name__} gets {shared} parameters that"
                f" {type(other).__name__} has as well: they were exchanged for shards at {line}, and are no longer"
                " what id() and `is` said of them before\n"
                '  try  if it was to get others, move the model to its device before: model.to("cpu")'
            )
            _Steps(message).watch(optimizer, other)


class _Steps:
    """The steps of two optimizers since both are there.

    Args:
        message: What to print when each has made one.
    """

    def __init__(self, message: str) -> None:
        self.message = message
        self.stepped: set[int] = set()

    def watch(self, *optimizers: Optimizer) -> None:
        """Look at their steps from now on."""
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._look)

    def _look(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.stepped.add(id(optimizer))
        if len(self.stepped) > 1 and self.message:
            messages.say(self.message)
            self.message = ""
