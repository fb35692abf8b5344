"""Note that a model was given to one of PyTorch/XLA's two classes, whoever did it."""

import functools
from collections.abc import Callable
from typing import Any

from fsdplaunch.runtime.sharding_watch import mark_sharded


def wrapper_classes() -> tuple[type, type]:
    """Return PyTorch/XLA's class of one process per device, and that of SPMD."""
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    return XlaFullyShardedDataParallel, SpmdFullyShardedDataParallel


def watch_wrappers() -> None:
    """Start to notice when one of them is built."""
    per_device, spmd = wrapper_classes()
    _notice(per_device, lambda _: None)
    _notice(spmd, _move)


def _notice(wrapper: Any, prepare: Callable[[Any], None]) -> None:
    construct = wrapper.__init__

    @functools.wraps(construct)
    def construct_and_mark(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        prepare(module)
        construct(self, module, *args, **_with_output(kwargs))
        mark_sharded(wrapper.__name__)

    wrapper.__init__ = construct_and_mark


def _move(module: Any) -> None:
    """Move a model before SPMD's class does, which makes several of a parameter that modules share."""
    from fsdplaunch.runtime.xla.devices import device
    from fsdplaunch.runtime.xla.move import move_model

    move_model(module, device())


def _with_output(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, with our function for outputs in place of transformers', which knows one kind only."""
    given = arguments.get("shard_output")
    if getattr(given, "__module__", "") != "transformers.trainer":
        return arguments
    from fsdplaunch.runtime.xla.devices import split_output

    return arguments | {"shard_output": split_output}
