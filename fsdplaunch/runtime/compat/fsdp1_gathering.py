"""Let rank 0 alone ask FSDP1 for what all ranks gather, and end with an error where only others do.

`if rank == 0: torch.save(model.state_dict(), f)` waits for ranks that never come, until the group's timeout. Here
they hand over their shards, once it is known that they are elsewhere.
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

from fsdplaunch.runtime.auto.state.late_tensors import StandingTensors
from fsdplaunch.runtime.auto.state.rank0.flat_optimizers import answer_for_rank_0, named_state
from fsdplaunch.runtime.auto.state.rank0.flat_shards import unit_key
from fsdplaunch.runtime.auto.state.rank0.flat_states import (
    HINT,
    FlatSource,
    alone,
    being_inside,
    inside,
    model_state,
)
from fsdplaunch.runtime.auto.state.rank0.pulling import rank0_saves
from fsdplaunch.runtime.collectives.monitored_barrier import monitored_barrier
from fsdplaunch.runtime.compat.fsdp1_cpu import own_memory
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import divided_over, show_unsharded_parameters

_STATE = "state_dict() of a model that FSDP1 has sharded"
_OPTIMIZER_STATES = ("optim_state_dict", "full_optim_state_dict")
_CALLS = ("summon_full_params", *_OPTIMIZER_STATES, "sharded_optim_state_dict")


def gather_with_all_ranks() -> None:
    """Have FSDP1's gathering calls wait for all ranks in a way that knows when some do not come."""
    if hasattr(Wrapper, "fsdplaunch_meets"):
        return
    Wrapper.fsdplaunch_meets = True  # type: ignore[attr-defined]
    Wrapper.state_dict = _state_dict_of_all(Wrapper.state_dict)  # type: ignore[method-assign]
    for name in _CALLS:
        setattr(Wrapper, name, staticmethod(_call_of_all(getattr(Wrapper, name))))
    answer_for_rank_0()


def _state_dict_of_all(state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(state_dict)
    def meet_and_gather(self: Any, *args: Any, **kwargs: Any) -> Any:
        if inside:
            return state_dict(self, *args, **kwargs)
        for unit in Wrapper.fsdp_modules(self):
            show_unsharded_parameters(unit)
        local = Wrapper.get_state_dict_type(self).state_dict_type is StateDictType.LOCAL_STATE_DICT
        with _on_all_ranks(_STATE, [] if local else [self]) as together:
            if together:
                return state_dict(self, *args, **kwargs)
            return model_state(self, FlatSource(_STATE, StandingTensors()), *args, **kwargs)

    return meet_and_gather


def _call_of_all(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__
    call = f"FSDP.{name}"

    @functools.wraps(function)
    def meet_and_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _on_all_ranks(call, [each for each in module.modules() if isinstance(each, Wrapper)]) as together:
            if together:
                with own_memory(module) if name == "optim_state_dict" else nullcontext():
                    return function(module, *args, **kwargs)
            if name not in _OPTIMIZER_STATES:
                raise alone(call, HINT)
            return named_state(module, args[0] if args else kwargs["optim"], call)

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
def _on_all_ranks(call: str, wrappers: Sequence[Wrapper]) -> Iterator[bool]:
    """Wait for all ranks that gather what some wrappers hold; a call around this one may have.

    Yields:
        Whether all are here; False where rank 0 is alone, and may fetch what the others hold.
    """
    gathering = [] if inside else [wrapper for wrapper in wrappers if _gathers(wrapper)]
    together = not gathering or _meet(call, gathering[0])
    with being_inside():
        yield together


def _meet(call: str, wrapper: Wrapper) -> bool:
    """Wait for the ranks over which a wrapper's parameters are divided: all, or those of this rank's replica."""
    group = dist.get_process_group_ranks(wrapper.process_group)
    ranks = group if len(group) < dist.get_world_size() else None
    saves = rank0_saves()
    if saves is not None:
        return saves.meet(call + _which(wrapper), HINT, ranks)
    monitored_barrier(call, HINT, ranks)
    return True


def _which(wrapper: Wrapper) -> str:
    """Return which model a call is for, where there are several: rank 0 may be in one, and others in another."""
    key = unit_key(wrapper)
    return "" if key is None or key == (0, 0) else f" (model {key[0]}, unit {key[1]})"
