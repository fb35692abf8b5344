"""Let a ZeroRedundancyOptimizer be the optimizer that it is given the class of, over shards.

Needed because it gives each rank some parameters to step and sends them to the others. A rank has a shard of every
parameter instead, and its optimizer the state of that shard: nothing is left to divide.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.patch import replaced_once_imported
from fsdplaunch.runtime.script_line import script_line

_PLAIN = ("step", "state_dict", "load_state_dict", "add_param_group")
"""The methods that divide work over ranks; those of the optimizer's class stand in their place."""


@contextmanager
def stepping_shards_plainly(ownership: Ownership) -> Iterator[None]:
    """Exchange the class of each ZeroRedundancyOptimizer that is built, unless the script shards by itself."""
    module = "torch.distributed.optim.zero_redundancy_optimizer"
    with replaced_once_imported(module, "ZeroRedundancyOptimizer.__init__", _building(ownership)):
        yield


def _building(ownership: Ownership) -> Any:
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
            _check_steps(overlap_with_ddp)
            self.__class__ = _plain(type(self), optimizer_class)
            optimizer_class.__init__(self, params, **defaults)
            _tell(optimizer_class.__name__)

        return __init__

    return build


def _check_steps(overlaps: bool) -> None:
    """Refuse an optimizer that a hook of DistributedDataParallel is to step.

    Raises:
        ShardingError: It is one.
    """
    if overlaps:
        msg = f"{script_line()} builds a ZeroRedundancyOptimizer with overlap_with_ddp: no bucket's hook steps it"
        raise ShardingError(msg, hint="leave overlap_with_ddp out, and call step() after backward()")


def _plain(zero: type[Any], kind: type[Optimizer]) -> type[Any]:
    """Return a class of both, whose methods are those of `kind`; named as it is, for what goes by names."""
    own = {name: getattr(kind, name) for name in _PLAIN}
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(
        kind.__name__, (zero, kind), {**own, **named, "consolidate_state_dict": _consolidate, "optim": _SELF}
    )


def _consolidate(_self: Any, to: int = 0) -> None:
    """Do nothing: a save gathers the state from wherever it is."""


_SELF = property(lambda optimizer: optimizer)
"""Where a ZeroRedundancyOptimizer has the optimizer that steps."""


def _tell(name: str) -> None:
    messages.say(
        f"{script_line()}: ZeroRedundancyOptimizer is {name} over the shards: its state is divided already"
    )
