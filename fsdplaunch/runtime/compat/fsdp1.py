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
from fsdplaunch.probe.torch_version import parse
from fsdplaunch.runtime.collectives import waits
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers
from fsdplaunch.runtime.messages import quiet_torch, script_line
from fsdplaunch.runtime.patch import wrap
from fsdplaunch.runtime.torch_internals.fsdp import divided_over, show_unsharded_parameters

_MENDED = (2, 14)


def take_out_offload_to_cpu() -> None:
    """Make `offload_to_cpu=True` mean False in torch's FSDP1, for state dicts and for `summon_full_params`.

    For workers whose device is the CPU, before the script runs. Does nothing with a torch that needs no such care.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

    if (parse(torch.__version__) or _MENDED) >= _MENDED or hasattr(Wrapper.set_state_dict_type, "__wrapped__"):
        return
    wrap(Wrapper, "set_state_dict_type", _set_type_staying)
    wrap(Wrapper, "summon_full_params", _summon_staying)


def _set_type_staying(
    set_type: Any, module: Any, kind: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> Any:
    return set_type(module, kind, _staying(state_dict_config), _staying(optim_state_dict_config))


def _summon_staying(summon: Any, *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(summon).bind(*args, **kwargs)
    call.arguments["offload_to_cpu"] = False
    return summon(*call.args, **call.kwargs)


@contextmanager
def own_memory(model: nn.Module) -> Iterator[None]:
    """Have each tensor of a state that FSDP1 gathers of an optimizer on a CPU get memory of its own.

    With `offload_to_cpu`, which is the default, torch gathers all of them into the same and moves them from there
    to where they are already: `exp_avg` has the values of `exp_avg_sq`. Seen in 2.9 to 2.15.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

    units: list[Any] = Wrapper.fsdp_modules(model)
    if not units or units[0].compute_device.type != "cpu":
        yield
        return
    now = Wrapper.get_state_dict_type(model)
    options = now.state_dict_config, _staying(now.optim_state_dict_config)
    with quiet_torch(), Wrapper.state_dict_type(model, now.state_dict_type, *options):
        yield


def shard_on_cpu() -> None:
    """Let scripts and libraries call `FSDP(model, ...)` on a CPU as they do for a GPU.

    There torch needs the device by name, and refuses two options: values are sent from rank 0 here
    (`sync_module_states`), and offloading has nothing to do.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

    wrap(Wrapper, "__init__", _construct_on_cpu)


def _construct_on_cpu(construct: Any, *args: Any, **kwargs: Any) -> None:
    call = inspect.signature(construct).bind(*args, **kwargs)
    given = call.arguments
    if given.get("device_id") is None and given.get("device_mesh") is None:
        given["device_id"] = torch.device("cpu")
    given.pop("cpu_offload", None)
    if given.get("sync_module_states") and _is_of_all(given.get("process_group")):
        send_from_rank_0(given["module"])
        given["sync_module_states"] = False
    if "HYBRID" in str(given.get("sharding_strategy")) and not ({"process_group", "device_mesh"} & set(given)):
        msg = f"{script_line()}: HYBRID_SHARD divides a model over a node's devices, and a node has one CPU"
        raise ShardingError(msg, hint="give FullyShardedDataParallel a device_mesh of two axes, or FULL_SHARD")
    construct(*call.args, **call.kwargs)


def _is_of_all(group: Any) -> bool:
    return group is None or (not isinstance(group, tuple) and dist.get_world_size(group) == dist.get_world_size())


def send_from_rank_0(model: nn.Module) -> None:
    """Overwrite a model's values with rank 0's, but for what FSDP1 has wrapped already. Collective."""
    from torch.distributed.device_mesh import init_device_mesh

    from fsdplaunch.runtime.sharding.materialize import Materializer

    wrappers = fsdp1_wrappers(model)
    if wrappers:
        wrapped = {part for wrapper in wrappers for part in wrapper.modules()}
        for part in model.modules():
            if part not in wrapped:
                for value in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                    dist.broadcast(value.data, 0)
        return
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    Materializer(model, mesh=mesh, device=torch.device("cpu"), master=None).materialize(model)


def _staying(config: Any) -> Any:
    if config is None or not config.offload_to_cpu:
        return config
    return dataclasses.replace(config, offload_to_cpu=False)


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
    wrap(Wrapper, "state_dict", _state_dict_of_all)
    for name in _CALLS:
        wrap(Wrapper, name, _call_of_all)


def _state_dict_of_all(state_dict: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if inside:
        return state_dict(self, *args, **kwargs)
    for unit in Wrapper.fsdp_modules(self):
        show_unsharded_parameters(unit)
    local = Wrapper.get_state_dict_type(self).state_dict_type is StateDictType.LOCAL_STATE_DICT
    with _on_all_ranks(_STATE, [] if local else [self]):
        return state_dict(self, *args, **kwargs)


def _call_of_all(function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    name = function.__name__
    memory = own_memory(module) if name == "optim_state_dict" else nullcontext()
    with _on_all_ranks(f"FSDP.{name}", fsdp1_wrappers(module)), memory:
        return function(module, *args, **kwargs)


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
    return waits.meets(call, HINT, ranks)
