"""Shard one model with the wrapper class FullyShardedDataParallel: one flat parameter per unit."""

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection.units import ModulePlaces
from fsdplaunch.runtime.sharding.checks import naming
from fsdplaunch.runtime.sharding.ignored import IgnoredParts
from fsdplaunch.runtime.sharding.materialize import Materializer
from fsdplaunch.runtime.sharding.settings import HYBRID, Settings, fsdp1_policy, offloads
from fsdplaunch.runtime.sharding.wrap import Units
from fsdplaunch.runtime.torch_internals.fsdp import sharding_strategy
from fsdplaunch.runtime.torch_internals.modules import BatchNorm


def shard(
    model: nn.Module,
    units: Units,
    *,
    settings: Settings,
    mesh: DeviceMesh,
    materializer: Materializer,
    out: IgnoredParts,
) -> nn.Module:
    """Wrap the units bottom-up and the model last, and return the outermost wrapper.

    Torch's `sync_module_states` works on GPUs only, so the units get rank 0's values from the materializer, one
    at a time and right before they are wrapped, as in FSDP2.
    """
    if materializer.device.type == "meta":
        msg = "fsdp_version 1 cannot shard a model onto the meta device"
        raise ShardingError(msg, hint="use fsdp_version: 2, or prepare on a device that has memory")
    prefetch, dtypes = settings.backward_prefetch, settings.dtypes
    common = {
        **_ranks(settings, mesh),
        **_left_out(settings, out),
        "cpu_offload": CPUOffload(offload_params=True) if offloads(settings, materializer.device.type) else None,
        "backward_prefetch": None if prefetch == "NO_PREFETCH" else BackwardPrefetch[prefetch],
        "forward_prefetch": settings.forward_prefetch,
        "limit_all_gathers": settings.limit_all_gathers,
        "use_orig_params": settings.use_orig_params,
        "device_id": materializer.device,
    }
    precision = fsdp1_policy(replace(dtypes, reduce=dtypes.reduce or dtypes.param)) if dtypes.mixed else None
    places = ModulePlaces(model)
    if dtypes.param is not None:  # batch norms keep their precision, in units of their own, as torch has it
        for norm in [module for module in model.modules() if isinstance(module, BatchNorm)]:
            materializer.materialize(norm)
            with materializer.wrapping():
                places.exchange(norm, FullyShardedDataParallel(norm, **common))
    for name, unit in reversed(units.items()):
        materializer.materialize(unit)
        with naming(name), materializer.wrapping():
            places.exchange(unit, FullyShardedDataParallel(unit, **common, mixed_precision=precision))
    materializer.materialize(model)
    with naming(type(model).__name__), materializer.wrapping():
        return FullyShardedDataParallel(model, **common, mixed_precision=precision)


def _ranks(settings: Settings, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the strategy and the ranks as it takes them: two axes for the hybrid ones, one for the others.

    A hybrid strategy with one replica is its plain counterpart. Given as a mesh, sharded state comes as DTensors,
    which FSDP2 reads, too. LOCAL_STATE_DICT takes no mesh.
    """
    name = str(settings.strategy)
    if mesh.ndim == 1 and name in HYBRID:
        name = "SHARD_GRAD_OP" if name == "HYBRID_SHARD_ZERO2" else "FULL_SHARD"
    strategy = {"sharding_strategy": sharding_strategy(name)}
    by_group = settings.state_dict_type == "LOCAL_STATE_DICT"
    if mesh.ndim == 1:
        return strategy | ({"process_group": mesh.get_group()} if by_group else {"device_mesh": mesh})
    if name == "NO_SHARD":
        return strategy | {"process_group": mesh.get_group(0)}
    if name in HYBRID and mesh.size(1) > 1:
        groups = mesh.get_group(1), mesh.get_group(0)
        return strategy | ({"process_group": groups} if by_group else {"device_mesh": mesh})
    msg = f"{name} does not fit a mesh of {' x '.join(str(n) for n in mesh.shape)} ranks"
    hint = "the hybrid strategies take replicas x shards, with more than one shard each; the others one axis"
    raise ShardingError(msg, hint=hint)


def _left_out(settings: Settings, out: IgnoredParts) -> dict[str, Any]:
    """Return what not to shard, as modules, or as parameters where some are alone: torch takes one of the two."""
    if not out.single:
        return {"ignored_modules": list(out.modules.values()) or None}
    if settings.dtypes.buffer is not None and any(True for m in out.modules.values() for _ in m.buffers()):
        msg = "under fsdp_version 1 a model with parameters kept in full cannot ignore modules with buffers"
        raise ShardingError(msg, hint="use fsdp_version: 2, or leave precision.buffer out")
    return {"ignored_states": out.parameters()}
