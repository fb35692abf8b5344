"""End with an error where only some ranks ask FSDP1 for what all ranks gather.

`if rank == 0: torch.save(model.state_dict(), f)` waits for ranks that never come, until the group's timeout.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime import rank0_service
from fsdplaunch.runtime.compat.fsdp1_cpu import own_memory
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import divided_over, show_unsharded_parameters

HINT = "take it out of `if rank == 0:` and let rank 0 write: what FSDP1 has sharded is gathered by all ranks"
_STATE = "state_dict() of a model that FSDP1 has sharded"
_CALLS = ("summon_full_params", "optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict")
inside: list[bool] = []
"""Not empty inside of a call that gathers what FSDP1 has sharded, which calls others."""


@contextmanager
def being_inside() -> Iterator[None]:
    """Note that calls which gather are made by another one that does."""
    inside.append(True)
    try:
        yield
    finally:
        inside.pop()


def gather_with_all_ranks() -> None:
    """Have FSDP1's gathering calls wait for all ranks in a way that knows when some do not come."""
    if hasattr(Wrapper, "fsdplaunch_meets"):
        return
    Wrapper.fsdplaunch_meets = True  # type: ignore[attr-defined]
    Wrapper.state_dict = _state_dict_of_all(Wrapper.state_dict)  # type: ignore[method-assign]
    for name in _CALLS:
        setattr(Wrapper, name, staticmethod(_call_of_all(getattr(Wrapper, name))))


def _state_dict_of_all(state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(state_dict)
    def meet_and_gather(self: Any, *args: Any, **kwargs: Any) -> Any:
        if inside:
            return state_dict(self, *args, **kwargs)
        for unit in Wrapper.fsdp_modules(self):
            show_unsharded_parameters(unit)
        local = Wrapper.get_state_dict_type(self).state_dict_type is StateDictType.LOCAL_STATE_DICT
        with _on_all_ranks(_STATE, [] if local else [self]):
            return state_dict(self, *args, **kwargs)

    return meet_and_gather


def _call_of_all(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__
    call = f"FSDP.{name}"

    @functools.wraps(function)
    def meet_and_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        memory = own_memory(module) if name == "optim_state_dict" else nullcontext()
        with _on_all_ranks(call, [each for each in module.modules() if isinstance(each, Wrapper)]), memory:
            return function(module, *args, **kwargs)

    return meet_and_call


def _gathers(wrapper: Wrapper) -> bool:
    """Return whether a wrapper's parameters are divided over all ranks of the run, and no thread asks."""
    strategy: Any = getattr(wrapper, "sharding_strategy", None)
    return (
        strategy is not ShardingStrategy.NO_SHARD
        and threading.current_thread() is threading.main_thread()
        and divided_over(wrapper) == dist.get_world_size()
    )


@contextmanager
def _on_all_ranks(call: str, wrappers: Sequence[Wrapper]) -> Iterator[None]:
    """Wait for all ranks that gather what some wrappers hold; a call around this one may have.

    Raises:
        CheckpointError: Only some make it.
    """
    gathering = [] if inside else [wrapper for wrapper in wrappers if _gathers(wrapper)]
    if gathering and not _meet(call, gathering[0]):
        msg = f"{call} at {script_line()} was called on rank 0 only"
        raise CheckpointError(msg, hint=HINT)
    with being_inside():
        yield


def _meet(call: str, wrapper: Wrapper) -> bool:
    """Wait for the ranks over which a wrapper's parameters are divided: all, or those of this rank's replica."""
    group = dist.get_process_group_ranks(wrapper.process_group)
    ranks = group if len(group) < dist.get_world_size() else None
    return rank0_service.meets(call, HINT, ranks)
