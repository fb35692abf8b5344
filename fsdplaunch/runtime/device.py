"""Which device this worker computes on, and the process group it shares with the others."""

import atexit
import functools
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.config.environment import DEVICE
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import MachineError
from fsdplaunch.runtime.collectives.gloo import keep_gloo_quiet, wait_for_gloo_at_exit
from fsdplaunch.runtime.collectives.stores import group_store
from fsdplaunch.runtime.patch import RANK0_SAVES_CLOSE, RANK0_SAVES_END, RANK0_SAVES_OPEN, call_if_imported, wrap


def see_own_gpu() -> None:
    """Show this process its own GPU only, as number 0, before anything asks CUDA for devices.

    For a script that takes its way for one process: it says `cuda:0`, and has no reason to ask for a number.
    """
    local, visible = int(os.environ.get("LOCAL_RANK", "0")), os.environ.get("CUDA_VISIBLE_DEVICES")
    named = [name for name in (visible or "").split(",") if name]
    # A worker without a GPU of its own is refused later, with its number.
    if visible is None or local < len(named):
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local) if visible is None else named[local]
        os.environ["LOCAL_RANK"] = "0"


def choose_device(config: Config) -> torch.device:
    """Return `cuda:LOCAL_RANK`, or the CPU when the launcher has planned that, or there is no GPU."""
    planned = os.environ.get(DEVICE)
    if config.use_cpu or planned == "cpu" or (planned != "cuda" and not torch.cuda.is_available()):
        return torch.device("cpu")
    require_gpus()
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if index >= count:
        msg = f"local rank {index} has no GPU of its own: {count} visible"
        raise MachineError(msg, hint="start fewer workers per node, or make more GPUs visible")
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
        torch.empty(1, device=device)  # a lost GPU, and NVSwitches without their manager, show here and not before
    except RuntimeError as error:
        raise _unusable(error) from None
    if config.precision.param == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        msg = f"{torch.cuda.get_device_name(device)} cannot compute in bf16"
        raise MachineError(msg, hint="set mixed_precision to fp16")
    return device


def require_gpus() -> None:
    """Refuse to go on, with torch's reason, where the launcher has planned for GPUs and torch cannot use any."""
    if os.environ.get(DEVICE) == "cuda" and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:  # a build for the CPU asserts
            raise _unusable(error) from None
        raise _unusable(RuntimeError("torch.cuda.is_available() is False"))


def _unusable(error: Exception) -> MachineError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    msg = f"this machine has GPUs, and torch {torch.__version__} cannot use them: {reason}"
    return MachineError(msg, hint="fsdplaunch doctor says more; --cpu runs on the CPU with gloo")


def join_group(config: Config, device: torch.device) -> None:
    """Make the default process group, with the configured timeout, before any other library makes its own.

    CPU tensors go over gloo and CUDA tensors over NCCL, whatever is offloaded later. The timeout is that of all
    groups that are made without one, such as the axes of meshes.
    """
    if config.debug:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        getattr(dist, "set_debug_level_from_env")()  # noqa: B009  (exported at run time only)
    keep_gloo_quiet()
    wait_for_gloo_at_exit()
    timeout = timedelta(seconds=config.launch.process_group_timeout_seconds)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = group_store(os.environ, rank=rank, size=size, timeout=timeout)  # the run's own, where there is one
    place: dict[str, Any] = {} if store is None else {"store": store, "rank": rank, "world_size": size}
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, name, timeout)
    if device.type == "cuda":
        dist.init_process_group(_BACKENDS, timeout=timeout, device_id=device, **place)
        # The device connected NCCL at once. Kept, torch 2.9 would split this group for each axis of a mesh, with
        # NCCL's options for gloo, and ranks outside of a script's gloo group would wait for those inside.
        world: Any = dist.group.WORLD
        world.bound_device_id = None
        wrap(dist, "get_backend", _name_as_torchrun)
    else:
        dist.init_process_group("gloo", timeout=timeout, **place)
    _answer_scripts_calls()


@functools.cache
def _answer_scripts_calls() -> None:
    wrap(dist, "init_process_group", _make_unless_made)
    dist.distributed_c10d.init_process_group = dist.init_process_group
    wrap(dist, "destroy_process_group", _destroy_unless_needed)
    atexit.register(leave_group)


def _make_unless_made(make: Any, *args: Any, **kwargs: Any) -> None:
    """Make a script's own `init_process_group()` a no-op while our group stands, where torch raises."""
    if dist.is_initialized():
        _joined.append(True)
    else:
        make(*args, **kwargs)


_BACKENDS = "cpu:gloo,cuda:nccl"


def _name_as_torchrun(get: Any, *args: Any, **kwargs: Any) -> str:
    """Return `nccl` for a group of both backends: scripts and torch's own functions compare with that."""
    backend = get(*args, **kwargs)
    return str(dist.Backend.NCCL) if backend == _BACKENDS else str(backend)


_joined: list[bool] = []


def joined_by_script() -> bool:
    """Return whether the script has called `init_process_group`: it is written for several ranks."""
    return bool(_joined)


_SEEING = ("torch", "fsdplaunch", "accelerate", "transformers")  # who finds the group where the script is not to


def hide_group() -> None:
    """Let `torch.distributed.is_initialized()` be False for a script whose ranks are hidden, and for what it uses.

    Optimizers and metrics ask it, and take another way (nanochat's). Libraries that shard still find the group.
    """
    initialized = dist.is_initialized

    @functools.wraps(initialized)
    def is_initialized() -> bool:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        return caller.partition(".")[0] in _SEEING and initialized()

    dist.is_initialized = is_initialized


def _destroy_unless_needed(destroy: Any, group: Any = None) -> None:
    """Keep the group when the script destroys it, as long as rank 0 may still save what this rank has."""
    is_default = group is None or group is dist.group.WORLD
    if is_default and call_if_imported(RANK0_SAVES_OPEN):
        call_if_imported(RANK0_SAVES_END)
    else:
        destroy(group)


_abandoned: list[bool] = []


def abandon_group() -> None:
    """Leave the group standing at exit: after a failure the other ranks may never answer."""
    _abandoned.append(True)


def group_is_abandoned() -> bool:
    """Return whether the group is left standing: the script failed."""
    return bool(_abandoned)


def leave_group() -> None:
    """Destroy the process group at the end of a clean run, after the script's threads and exit handlers."""
    if _abandoned:
        return
    call_if_imported(RANK0_SAVES_CLOSE)
    if dist.is_initialized():
        destroy = dist.destroy_process_group
        getattr(destroy, "__wrapped__", destroy)()
