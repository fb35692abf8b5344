"""Initial values drawn for a sharded parameter are those of the whole one.

Needed by scripts that initialise a model after they moved it. Torch draws for each shard by itself, which on CPU
gives every rank the same numbers.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.patch import replaced

_DRAWS = ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_")


@contextmanager
def drawing_whole(hook_context: HookContext) -> Iterator[None]:
    """Draw the whole tensor from the stream that all ranks share, and keep this rank's part."""
    with ExitStack() as stack:
        for name in _DRAWS:
            stack.enter_context(replaced(DTensor, name, _drawn_whole(getattr(torch.Tensor, name), hook_context)))
        yield


def _drawn_whole(draw: Any, hook_context: HookContext) -> Any:
    def draw_and_cut(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if not hook_context.ownership.ours:
            return draw(self, *args, **kwargs)
        empty = torch.empty(self.shape, dtype=self.dtype, device=self.to_local().device)
        with hook_context.streams.shared():
            whole = draw(empty, *args, **kwargs)
        with torch.no_grad():
            self.copy_(distribute_tensor(whole, self.device_mesh, self.placements))
        return self

    return lambda _: draw_and_cut
