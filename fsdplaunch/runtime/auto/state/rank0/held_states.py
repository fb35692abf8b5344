"""Keep what ranks have shards of alive until rank 0 can no longer save it alone.

A function that trains returns on other ranks while rank 0 still saves in it. What its variables held there (the
optimizer, the best weights so far) is part of what rank 0 writes.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.rank0.copies import living_copies
from fsdplaunch.runtime.auto.state.rank0.position import trains_shards


@contextmanager
def holding_states(hook_context: HookContext) -> Iterator[None]:
    """Hold models, optimizers and copies from one optimizer step to the next.

    A rank comes to a step when all have averaged their gradients: rank 0 is then past what it saved before. All
    ranks hold the same, because copies have numbers by how many there are.

    Args:
        hook_context: This worker's.
    """
    held: list[Any] = []

    def let_go(optimizer: Optimizer, *_: Any) -> None:
        if trains_shards(optimizer):
            held.clear()

    def hold(optimizer: Optimizer, *_: Any) -> None:
        if trains_shards(optimizer):
            optimizers = (each for _, each in hook_context.numbered_optimizers())
            held[:] = [*hook_context.numbers, *optimizers, *living_copies()]

    with ExitStack() as stack:
        stack.callback(held.clear)
        if hook_context.size > 1:
            stack.callback(register_optimizer_step_pre_hook(let_go).remove)
            stack.callback(register_optimizer_step_post_hook(hold).remove)
        yield
