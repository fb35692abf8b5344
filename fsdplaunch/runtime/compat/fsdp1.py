"""What scripts that call torch's FSDP1 need: on a CPU, and where rank 0 alone asks for what all ranks gather."""

import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from fsdplaunch.errors import CheckpointError, ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives import waits
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers
from fsdplaunch.runtime.messages import quiet_torch, script_line
from fsdplaunch.runtime.patch import wrap
from fsdplaunch.runtime.torch_internals.fsdp import divided_over, mend_flat_parameters
from fsdplaunch.runtime.torch_internals.modules import own_tensors


@contextmanager
def _own_memory(model: nn.Module) -> Iterator[None]:
    """Have each tensor of a state that FSDP1 gathers of an optimizer on a CPU get memory of its own.

    With `offload_to_cpu`, which is the default, torch gathers all of them into the same and moves them from there
    to where they are already: `exp_avg` has the values of `exp_avg_sq`. Seen in 2.9 to 2.15.
    """
    units: list[Any] = Wrapper.fsdp_modules(model)
    if not units or units[0].compute_device.type != "cpu":
        yield
        return
    now = Wrapper.get_state_dict_type(model)
    staying = dataclasses.replace(now.optim_state_dict_config, offload_to_cpu=False)
    with quiet_torch(), Wrapper.state_dict_type(model, now.state_dict_type, now.state_dict_config, staying):
        yield


def construct_on_cpu(construct: Any, *args: Any, **kwargs: Any) -> None:
    """Let scripts and libraries call `FSDP(model, ...)` on a CPU as they do for a GPU.

    There torch needs the device by name, and refuses two options: values are sent from rank 0 here
    (`sync_module_states`), and offloading has nothing to do.
    """
    call = inspect.signature(construct).bind(*args, **kwargs)
    given = call.arguments
    if given.get("device_id") is None and given.get("device_mesh") is None:
        given["device_id"] = torch.device("cpu")
    if getattr(given.pop("cpu_offload", None), "offload_params", False):
        messages.say("parameters are in host memory already: offloading has nothing to do here")
    group = given.get("process_group")
    of_all = not isinstance(group, tuple) and dist.get_world_size(group) == dist.get_world_size()
    if given.get("sync_module_states") and of_all:
        send_from_rank_0(given["module"])
        given["sync_module_states"] = False
    if "HYBRID" in str(given.get("sharding_strategy")) and not ({"process_group", "device_mesh"} & set(given)):
        msg = f"{script_line()}: HYBRID_SHARD divides a model over a node's devices, and a node has one CPU"
        raise ShardingError(msg, hint="give FullyShardedDataParallel a device_mesh of two axes, or FULL_SHARD")
    construct(*call.args, **call.kwargs)


def send_from_rank_0(model: nn.Module) -> None:
    """Overwrite a model's values with rank 0's, but for what FSDP1 has wrapped already. Collective."""
    from torch.distributed.device_mesh import init_device_mesh

    from fsdplaunch.runtime.sharding.materialize import Materializer

    wrappers = fsdp1_wrappers(model)
    if wrappers:
        wrapped = {part for wrapper in wrappers for part in wrapper.modules()}
        for part in model.modules():
            if part not in wrapped:
                RankGroup().send(*(value.data for _, value in own_tensors(part)))
        return
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    Materializer(model, mesh=mesh, device=torch.device("cpu"), master=None).materialize(model)


_HINT = "take it out of `if rank == 0:` and let rank 0 write: what FSDP1 has sharded is gathered by all ranks"
_STATE = "state_dict() of a model that FSDP1 has sharded"
_CALLS = ("summon_full_params", "optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict")
_inside: list[bool] = []  # not empty inside of a call that gathers what FSDP1 has sharded, which calls others


def gather_with_all_ranks() -> None:
    """Have FSDP1's gathering calls wait for all ranks in a way that knows when some do not come."""
    mend_flat_parameters()
    wrap(Wrapper, "state_dict", _state_dict_of_all)
    for name in _CALLS:
        wrap(Wrapper, name, _call_of_all)


def _state_dict_of_all(state_dict: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if _inside:
        return state_dict(self, *args, **kwargs)
    local = Wrapper.get_state_dict_type(self).state_dict_type is StateDictType.LOCAL_STATE_DICT
    with _on_all_ranks(_STATE, [] if local else [self]):
        return state_dict(self, *args, **kwargs)


def _call_of_all(function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    name = function.__name__
    memory = _own_memory(module) if name == "optim_state_dict" else nullcontext()
    with _on_all_ranks(f"FSDP.{name}", fsdp1_wrappers(module)), memory:
        return function(module, *args, **kwargs)


@contextmanager
def _on_all_ranks(call: str, wrappers: Sequence[Wrapper]) -> Iterator[None]:
    """Wait for the ranks of a replica that gather what some wrappers hold; a call around this one may have."""
    asks = not _inside and threading.current_thread() is threading.main_thread()
    for wrapper in wrappers if asks else ():
        strategy: Any = getattr(wrapper, "sharding_strategy", None)
        if strategy is not ShardingStrategy.NO_SHARD and divided_over(wrapper) == dist.get_world_size():
            ranks = dist.get_process_group_ranks(wrapper.process_group)
            if not waits.meets(call, _HINT, ranks if len(ranks) < dist.get_world_size() else None):
                msg = f"{call} at {script_line()} was called on rank 0 only"
                raise CheckpointError(msg, hint=_HINT)
            break
    _inside.append(True)
    try:
        yield
    finally:
        _inside.pop()
