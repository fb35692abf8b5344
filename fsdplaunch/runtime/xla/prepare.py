"""`prepare` under PyTorch/XLA: SPMD over all devices, or one process per device."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
from torch import nn
from torch.optim import Optimizer
from torch_xla import runtime
from torch_xla.distributed import spmd
from torch_xla.distributed.fsdp import checkpoint_module

from fsdplaunch.config.environment import decode
from fsdplaunch.config.schema.config import Config
from fsdplaunch.display_text import short_count
from fsdplaunch.errors import ShardingError, UsageError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.api.prepare import fit
from fsdplaunch.runtime.plugin import FullyShardedDataParallelPlugin
from fsdplaunch.runtime.rank import DataRanks
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.sharding.wrap import plan_units
from fsdplaunch.runtime.torch_internals.tensors import tree_map
from fsdplaunch.runtime.xla import (
    devices,
    saving,  # noqa: F401  (the doors look for these two)
    wrappers,  # noqa: F401  (the doors look for these two)
)
from fsdplaunch.runtime.xla.wrappers import move_model, repoint, wrapper_classes


def _shard(model: nn.Module, settings: Settings, config: Config) -> nn.Module:
    """Return PyTorch/XLA's wrapper around a model with rank 0's values, on its devices and sharded over them."""
    _check(model, settings)
    size = sum(param.numel() for param in model.parameters())
    units, spmd_run = set(plan_units(model, settings, set()).values()), runtime.is_spmd()
    if dist.get_world_size() > 1:  # all begin with rank 0's values, while they are in host memory
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, 0)
    move_model(model, torch_xla.device())
    again = settings.activation_checkpointing or config.fsdp_config.xla_fsdp_grad_ckpt
    outer: Any = wrapper_classes()[spmd_run]

    def is_unit(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:  # noqa: ARG001  (torch's form)
        return recurse or module in units

    def make_unit(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        unit: nn.Module = outer(checkpoint_module(module) if again else module, *args, **kwargs)
        return unit

    if spmd_run:
        arguments = {"mesh": spmd.get_global_mesh(), "shard_output": devices.split_output}
    else:
        arguments = wrapper_arguments(settings, config)
    wrapped: nn.Module = outer(model, auto_wrap_policy=is_unit, auto_wrapper_callable=make_unit, **arguments)
    wrapped.register_forward_pre_hook(_place_inputs, with_kwargs=True)
    dtype = settings.dtypes.param
    if spmd_run and dtype not in (None, torch.float32):
        forward = wrapped.forward

        def forward_in_dtype(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("xla", dtype=dtype):
                return forward(*args, **kwargs)

        wrapped.forward = forward_in_dtype
    way = "xla_fsdp_v2" if spmd_run else "XlaFullyShardedDataParallel"
    kept = ", recomputed in backward" if again else ""
    found = runtime.global_runtime_device_count() if spmd_run else runtime.world_size()
    where = f"{found} {runtime.device_type()} {'device' if found == 1 else 'devices'}"
    held = f"{len(units)} units{kept}, {short_count(size)} parameters"
    messages.say(f"sharded {type(model).__name__}: {held}, {way} over {where}")
    return wrapped


def _check(model: nn.Module, settings: Settings) -> None:
    if settings.ignored is not None:
        msg = "fsdp_ignored_modules has no meaning under PyTorch/XLA: its FSDP takes all parameters"
        raise ShardingError(msg, hint="leave it out")
    if any(param.is_meta for param in model.parameters()):
        msg = f"{type(model).__name__} has parameters on the meta device, which PyTorch/XLA cannot fill"
        raise ShardingError(msg, hint="build it with values, or load them before prepare")


def wrapper_arguments(settings: Settings, config: Config) -> dict[str, Any]:
    """Return the arguments of `XlaFullyShardedDataParallel`: xla_fsdp_settings, and what other keys say."""
    arguments: dict[str, Any] = {"reshard_after_forward": bool(settings.reshard_after_forward)}
    if settings.strategy == "SHARD_GRAD_OP":
        arguments["reshard_after_forward"] = False
    if settings.dtypes.param is not None:
        arguments["compute_dtype"] = settings.dtypes.param
        arguments["fp32_reduce_scatter"] = settings.dtypes.reduce is torch.float32
    for name, value in config.fsdp_config.xla_fsdp_settings.items():
        arguments[name] = getattr(torch, value) if name in ("compute_dtype", "buffer_dtype") else value
    return arguments


def _place_inputs(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Move what a script gives from host memory to the devices; under SPMD each gets its share of the batch."""

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type == "xla":
            return value
        moved = value.to(torch_xla.device())
        return devices.split_first_dim(moved) if runtime.is_spmd() else moved

    return tree_map(placed, args), tree_map(placed, kwargs)


def prepare_on_xla(
    objects: Sequence[Any], plugin: FullyShardedDataParallelPlugin, unsupported: dict[str, Any]
) -> tuple[Any, ...]:
    """Do for PyTorch/XLA what `fsdplaunch.prepare` does; wrappers are returned in the models' places.

    Under SPMD one process has the whole batch, which is split over the devices: a loader's batch size is that of
    all devices together. Otherwise each process reads its own items.
    """
    for name, value in unsupported.items():
        if value is not None and value is not False:
            msg = f"prepare({name}=...) has no meaning under PyTorch/XLA"
            raise UsageError(msg, hint="leave it out; load weights before prepare")
    config, ready = decode(), dict[int, Any]()
    known: dict[int, tuple[str, nn.Module]] = {}
    for model in {id(item): item for item in objects if isinstance(item, nn.Module)}.values():
        ready[id(model)] = model
        if not isinstance(model, wrapper_classes()):
            names = {id(param): name for name, param in model.named_parameters()}
            wrapped = ready[id(model)] = _shard(model, plugin.settings(), config)
            known |= {number: (name, wrapped) for number, name in names.items()}
    for optimizer in {id(item): item for item in objects if isinstance(item, Optimizer)}.values():
        repoint(optimizer, known)
        optimizer.register_step_post_hook(lambda *_: torch_xla.sync())
        ready[id(optimizer)] = optimizer
    readers = DataRanks(rank=0, size=1)  # under SPMD every process has the same items
    if not runtime.is_spmd():
        readers = DataRanks(rank=runtime.global_ordinal(), size=runtime.world_size())
    return tuple(ready[id(item)] if id(item) in ready else fit(item, readers) for item in objects)
