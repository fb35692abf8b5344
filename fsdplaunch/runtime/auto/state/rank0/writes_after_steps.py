"""Let ranks wait for rank 0 where they write into parameters between an optimizer's step and the next pass.

Needed because rank 0 may still save what they have: `prototypes.weight.copy_(normed)` at the beginning of a loop,
weights that are clamped after an epoch. A pass, or a collective, is where they wait otherwise.
"""

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.rank0.copies import in_optimizer_step
from fsdplaunch.runtime.auto.state.rank0.passes import meet_rank0
from fsdplaunch.runtime.auto.state.rank0.shard_names import identity, moves
from fsdplaunch.runtime.inspection.parameter_names import named_parameters
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.tensors import tree_leaves


class WritesAfterSteps:
    """Waits at the first such write after a step, in scripts that have ranks: others save on all ranks.

    Args:
        hook_context: This worker's.
    """

    def __init__(self, hook_context: HookContext) -> None:
        self._hook_context = hook_context
        self._known: tuple[int, ...] = ()
        self._parameters: set[tuple[Any, ...]] = set()
        self._alone_at: tuple[Any, ...] = ()

    def waiting(self, write: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
        """Return a handler of what writes into its first argument."""

        def compute(func: Any, args: Any, kwargs: Any) -> Any:
            here = self._hook_context
            if here.ownership.ranked and here.position.is_after_step() and not in_optimizer_step():
                self._wait(args[0])
            return write(func, args, kwargs)

        return compute

    def _wait(self, target: Any) -> None:
        """Meet all ranks, unless it is no parameter that is written into; rank 0 asks once at each line."""
        if not any(map(self._is_parameter, (target,) if isinstance(target, DTensor) else tree_leaves(target))):
            return
        position = self._hook_context.position
        at = (script_line(), *position.stepped_at)
        if at == self._alone_at:
            return
        meet_rank0(f"a change of parameters at {at[0]}")
        self._alone_at = at if position.is_after_step() else ()

    def _is_parameter(self, value: Any) -> bool:
        if not isinstance(value, DTensor):
            return False
        models = self._hook_context.numbers
        if self._known != (len(models), *moves):
            self._known = len(models), *moves
            params = (param for model in list(models) for _, param in named_parameters(model))
            self._parameters = {identity(param) for param in params if isinstance(param, DTensor)}
        return identity(value) in self._parameters
