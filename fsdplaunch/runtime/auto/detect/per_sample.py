"""Refuse optimizers that clip the gradient of each sample (Opacus), where the model is sharded for the script.

Needed because they read a gradient for each sample beside the full parameter, and FSDP2 has summed over the
samples and cut the result before anybody could clip: what is left fails inside of the library.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.script_line import script_line

_MODULE, _CLASS = "opacus.optimizers.optimizer", "DPOptimizer"


@contextmanager
def refusing_per_sample(hook_context: HookContext) -> Iterator[None]:
    """Adapt the class when a script imports it; it stays adapted, for it acts only where the launcher shards."""

    def adapt(module: Any) -> None:
        cls = getattr(module, _CLASS)
        construct = cls.__init__

        @wraps(construct)
        def __init__(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            if hook_context.ownership.ours and _trains_shards(optimizer):
                raise _refusal()
            construct(self, optimizer, *args, **kwargs)

        cls.__init__ = __init__

    once_imported(_MODULE, adapt)
    yield


def _trains_shards(optimizer: Any) -> bool:
    return any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])


def _refusal() -> ShardingError:
    msg = f"{script_line()}: Opacus clips the gradient of each sample, which a sharded model does not have"
    hint = (
        "train in one process; or let the script use Opacus's own DifferentiallyPrivateDistributedDataParallel,"
        " and launch it with --shard off"
    )
    return ShardingError(msg, hint=hint)
