"""`load_weights`: pretrained weights into a model that is sharded already."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdplaunch.config.environment import decode
from fsdplaunch.errors import CheckpointError, UsageError
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.inspection.model_tensors import model_tensors
from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.inspection.xla_models import refuse_of_xla
from fsdplaunch.runtime.late_modules import WAIT_FOR_COPIES, call_if_imported
from fsdplaunch.runtime.loading.deferred_weights import give_memory
from fsdplaunch.runtime.loading.execute_plan import LoadedWeights, execute_plan, report_loaded
from fsdplaunch.runtime.loading.load_plan import LoadPlan, make_plan
from fsdplaunch.runtime.loading.local_shards import LocalShard, local_shards
from fsdplaunch.runtime.loading.match_names import RequestedTensor
from fsdplaunch.runtime.loading.pretrained import Pretrained
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.sharding.mesh import groups_from_first
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.torch_internals.modules import IncompatibleKeys


def load_weights(
    model: nn.Module, weights: str | os.PathLike[str] | None = None, *, strict: bool | None = None
) -> IncompatibleKeys:
    """Read pretrained weights into a sharded model, every rank its own shards only; every rank calls this.

    The model may be sharded by anyone: by `prepare`, by `fully_shard` over a mesh of any number of axes, by
    FullyShardedDataParallel. Parameters still on the meta device get memory for their shards. `prepare` with
    weights does all of this at once, and keeps the model from ever having more.

    Args:
        model: Sharded.
        weights: A model folder or a weight file; `checkpoint.weights` of the configuration when left out.
        strict: Whether tensors missing in the files or left over in them are errors; `checkpoint.weights_strict`
            when left out.

    Returns:
        The names that were missing and those left over, as torch's `load_state_dict` does.

    Raises:
        CheckpointError: The files cannot be read, or are of another model; raised on every rank.
        UsageError: Neither the call nor the configuration names weights.
    """
    refuse_of_xla(model, "load_weights")
    configured = decode().checkpoint
    named = configured.weights if weights is None else weights
    if named is None:
        msg = "load_weights was given no weights, and checkpoint.weights is not set"
        raise UsageError(msg, hint="give it a model folder")
    source = Pretrained(where=Path(named), strict=configured.weights_strict if strict is None else strict)
    source.note()
    plan, loaded = _load(model, source.where, strict=source.strict)
    report_loaded(plan, loaded, name=class_name(model), made=plan.match.missing)
    return IncompatibleKeys(plan.match.missing, plan.match.unexpected)


def load_full(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool, on_host: bool = False
) -> IncompatibleKeys:
    """Split a state dict that only the first rank needs to hold over a sharded model; every rank calls this.

    Tensors are sent in pieces, so that no other rank ever holds a full one.

    Args:
        model: Sharded by either version; parameters on the meta device get memory for their shards.
        state: Full tensors by name on the first rank; not looked at elsewhere.
        strict: Whether names that are missing or left over are errors.
        on_host: Whether parameters on the meta device get memory of the host, for offloading.

    Returns:
        The names that were missing and those left over.

    Raises:
        CheckpointError: The tensors are of another model; raised on every rank.
    """
    plan, _ = _load(model, state, strict=strict, on_host=on_host)
    return IncompatibleKeys(plan.match.missing, [*plan.match.unexpected, *plan.match.passed])


def _load(
    model: nn.Module, where: Path | Mapping[str, Any], *, strict: bool, on_host: bool = False
) -> tuple[LoadPlan, LoadedWeights]:
    call_if_imported(WAIT_FOR_COPIES)  # a save under way copies what is about to be changed
    ranks = _ranks(model)
    for module in model.modules():
        if is_unit(module):
            unit: Any = module
            unit.reshard()
    held = local_shards(model)
    wanted = [
        RequestedTensor(names=shard.names, shape=shard.shape, dtype=shard.local.dtype, saved=shard.saved)
        for shard in held
    ]
    plan = make_plan(ranks, model, wanted, where, strict=strict)
    with ranks.raise_on_all(f"load weights from {plan.where}"):
        _check_memory(held, plan)
    for entry in model_tensors(model):
        give_memory(entry, torch.device("cpu") if on_host else ranks.device)
    return plan, execute_plan(ranks, plan, local_shards(model))


def _check_memory(held: Sequence[LocalShard], plan: LoadPlan) -> None:
    """Refuse to leave a tensor without values; here nothing can make them any more."""
    for shard in held:
        if shard.local.is_meta and plan.stored(shard.names) is None:
            msg = f"{shard.names[0]} is on the meta device, and no file holds it"
            raise CheckpointError(msg, hint="load with fsdplaunch.prepare(model, weights=...), which makes it")


def _ranks(model: nn.Module) -> RankGroup:
    mesh = _mesh(model)
    if mesh is not None:
        return RankGroup(groups_from_first(mesh), _device(mesh))
    groups: list[dist.ProcessGroup | None] = [None] if dist.is_initialized() else []
    first = next(model.parameters(), None)
    return RankGroup(groups, torch.device("cpu") if first is None or first.is_meta else first.device)


def _mesh(model: nn.Module) -> DeviceMesh | None:
    prepared = registered(model)
    if prepared is not None:
        return prepared.mesh
    return next((param.device_mesh for param in model.parameters() if isinstance(param, DTensor)), None)


def _device(mesh: DeviceMesh) -> torch.device:
    on_cpu = mesh.device_type == "cpu"
    return torch.device("cpu") if on_cpu else torch.device(mesh.device_type, torch.cuda.current_device())
