"""What a description needs to know of a model beside its units: kept when `prepare` sharded it, else looked up."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.inspection.introspect import fsdp2_units
from fsdplaunch.runtime.inspection.parameter_names import named_parameters, parameters_of, tied_names
from fsdplaunch.runtime.sharding.mesh import data_mesh
from fsdplaunch.runtime.sharding.registry import ShardedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """See `ShardingDescription`, which has the same names."""

    strategy: str
    mesh: dict[str, int]
    device: str
    tied: tuple[tuple[str, ...], ...]
    ignored: tuple[str, ...]
    left_out: frozenset[str]
    methods: tuple[str, ...]
    float8: int
    plan: str = ""
    context: int = 1
    attention: str = "auto"


def kept_layout(prepared: ShardedModel) -> Layout:
    """Return the layout of a model that `prepare` sharded."""
    return Layout(
        strategy=prepared.settings.strategy,
        mesh=dict(zip(prepared.mesh.mesh_dim_names or ("ranks",), prepared.mesh.shape, strict=True)),
        device=str(prepared.device),
        tied=prepared.tied,
        ignored=prepared.ignored,
        left_out=prepared.left_out,
        methods=prepared.methods,
        float8=prepared.converted,
        context=1 if prepared.sequences is None else prepared.sequences.axis.size(),
        attention="auto" if prepared.sequences is None else prepared.sequences.way,
        plan="" if prepared.split is None else prepared.split.origin,
    )


def seen_layout(model: nn.Module) -> Layout:
    """Return the layout of a model that something else has sharded, as its units show it."""
    fsdp1 = isinstance(model, FullyShardedDataParallel)
    strategy, mesh, left_out = _fsdp1(model) if fsdp1 else _fsdp2(model)
    return Layout(
        strategy=strategy,
        mesh=mesh,
        device=str(next(parameters_of(model)).device),
        tied=() if fsdp1 else tied_names(model),
        ignored=(),
        left_out=left_out,
        methods=(),
        float8=0,
    )


def _fsdp1(model: Any) -> tuple[str, dict[str, int], frozenset[str]]:
    strategy = model.sharding_strategy.name.lstrip("_")
    return strategy, {"ranks": model.process_group.size()}, frozenset()


def _fsdp2(model: nn.Module) -> tuple[str, dict[str, int], frozenset[str]]:
    named = dict(named_parameters(model))
    sharded = {name: param for name, param in named.items() if isinstance(param, DTensor)}
    mesh = max((param.device_mesh for param in sharded.values()), key=lambda mesh: mesh.ndim)
    (_, *units) = fsdp2_units(model)
    freed = not units or any(unit.reshard_after_forward for unit in units)  # the root stays gathered either way
    strategy = "FULL_SHARD" if freed else "SHARD_GRAD_OP"
    if data_mesh(mesh).ndim > 1:
        strategy = "HYBRID_SHARD" if freed else "HYBRID_SHARD_ZERO2"
    names = mesh.mesh_dim_names or tuple(f"ranks{axis}" for axis in range(mesh.ndim))
    return strategy, dict(zip(names, mesh.shape, strict=True)), frozenset(named) - frozenset(sharded)
