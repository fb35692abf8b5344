"""Let a ZeroRedundancyOptimizer be the optimizer that it is given the class of, over shards. Rule 7.

It gives each rank some parameters to step and sends them to the others. A rank has a shard of every parameter
instead, and its optimizer the state of that shard: nothing is left to divide.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.model.who_shards import Ownership
from fsdplaunch.runtime.patch import replaced_once_imported
from fsdplaunch.runtime.script_line import script_line

_PLAIN = ("step", "state_dict", "load_state_dict", "add_param_group")
"""The methods that divide work over ranks; those of the optimizer's class stand in their place."""


@contextmanager
def stepping_shards_plainly(ownership: Ownership) -> Iterator[None]:
    """Exchange the class of each ZeroRedundancyOptimizer that is built over shards."""

    def build(original: Any) -> Any:
        def __init__(  # noqa: N807
            self: Any,
            params: Any,
            optimizer_class: type[Optimizer],
            process_group: Any = None,
            parameters_as_bucket_view: bool = False,
            overlap_with_ddp: bool = False,
            **defaults: Any,
        ) -> None:
            if ownership.ours is False:
                how = (process_group, parameters_as_bucket_view, overlap_with_ddp)
                original(self, params, optimizer_class, *how, **defaults)
                return
            if overlap_with_ddp:
                what = "builds a ZeroRedundancyOptimizer with overlap_with_ddp: no bucket's hook steps it"
                msg = f"{script_line()} {what}"
                raise ShardingError(msg, hint="leave overlap_with_ddp out, and call step() after backward()")
            self.__class__ = _plain(type(self), optimizer_class)
            optimizer_class.__init__(self, params, **defaults)

        return __init__

    module = "torch.distributed.optim.zero_redundancy_optimizer"
    with replaced_once_imported(module, "ZeroRedundancyOptimizer.__init__", build):
        yield


def _plain(zero: type[Any], kind: type[Optimizer]) -> type[Any]:
    """Return a class of both, whose methods are those of `kind`; named as it is, for what goes by names."""
    from torch.distributed.algorithms.join import JoinHook

    return type(
        kind.__name__,
        (zero, kind),
        {
            **{name: getattr(kind, name) for name in _PLAIN},
            **{"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__},
            "optim": property(lambda optimizer: optimizer),  # where the one that steps is
            "consolidate_state_dict": lambda *_, **__: None,  # a save gathers the state from wherever it is
            "join_hook": lambda *_, **__: JoinHook(),
            "join_device": property(lambda optimizer: optimizer.param_groups[0]["params"][0].device),
            "join_process_group": property(lambda _: dist.group.WORLD),
        },
    )
