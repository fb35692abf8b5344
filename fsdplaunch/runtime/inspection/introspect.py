"""Read back from torch's own objects how a model is sharded."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.compute.compile import CompiledForward
from fsdplaunch.runtime.inspection.parameter_names import clean_name, parameters_of, unwrapped
from fsdplaunch.runtime.inspection.units import is_unit, original_class
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import flat_parameter
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import (
    full_size,
    mixed_precision_of,
    param_groups,
    prefetches_forward,
    root_mixed_precision,
)
from fsdplaunch.runtime.torch_internals.modules import CheckpointWrapper, OffloadWrapper
from fsdplaunch.runtime.torch_internals.wrappers import checkpointed_module


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedUnit:
    """Parameters that are gathered and freed together.

    Attributes:
        name: The module's clean name; empty for the root.
        kind: The module's class, as the user wrote it.
        parameters: How many numbers it holds over all ranks of one replica.
        reshard_after_forward: Whether it is freed after forward, or the number of ranks it is then spread over.
        compute: Dtype it is gathered and computed in, or None for the one it is kept in.
        reduce: Dtype its gradients are summed in, or None for the one they have.
    """

    name: str
    kind: str
    parameters: int
    reshard_after_forward: bool | int
    compute: str | None
    reduce: str | None


def fsdp2_units(model: nn.Module) -> Iterator[ShardedUnit]:
    """Yield the units of an FSDP2 model, the root first."""
    for name, module in model.named_modules():
        if not is_unit(module):
            continue
        groups = param_groups(module)
        policy = mixed_precision_of(groups[0]) if groups else None
        after = groups[0].post_forward_mesh_info if groups else None
        yield ShardedUnit(
            name=clean_name(name),
            kind=own_class(module),
            parameters=sum(prod(full_size(param)) for group in groups for param in group.fsdp_params),
            reshard_after_forward=_resharded(after, groups),
            compute=dtype_name(policy.param_dtype) if policy else None,
            reduce=dtype_name(policy.reduce_dtype) if policy else None,
        )


def _resharded(after: Any, groups: Any) -> bool | int:
    """Return whether an FSDP2 unit is freed after forward, or the number of ranks it is then spread over."""
    if after is None:
        return False
    size = int(after.shard_mesh_size)
    return True if size == groups[0].mesh_info.shard_mesh_size else size


def fsdp1_units(model: nn.Module) -> Iterator[ShardedUnit]:
    """Yield the units of an FSDP1 model, the root first."""
    for name, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        flat = flat_parameter(module)
        yield ShardedUnit(
            name=clean_name(name),
            kind=own_class(module.module),
            parameters=sum(map(prod, flat.shapes)) if flat else 0,
            reshard_after_forward=module.sharding_strategy.name in ("FULL_SHARD", "HYBRID_SHARD"),
            compute=dtype_name(module.mixed_precision.param_dtype),
            reduce=dtype_name(module.mixed_precision.reduce_dtype),
        )


def flat_parameters(model: nn.Module) -> Iterator[tuple[torch.dtype, int, bool]]:
    """Yield dtype, size and whether it gets a gradient, of each full parameter in FSDP1's flat ones."""
    for module in model.modules():
        flat = flat_parameter(module) if isinstance(module, FullyShardedDataParallel) else None
        if flat is None:
            continue
        flags = [p.requires_grad for p in flat.params] or [flat.tensor.requires_grad] * len(flat.shapes)
        for shape, trained in zip(flat.shapes, flags, strict=True):
            yield flat.tensor.dtype, prod(shape), trained


def wrappers(model: nn.Module) -> dict[str, Any]:
    """Return what is recomputed, offloaded and compiled, by the names of the description."""
    modules = list(model.named_modules())
    again = [clean_name(name) for name, module in modules if isinstance(module, CheckpointWrapper)]
    inside = model.module if isinstance(model, FullyShardedDataParallel) else model
    inner = any("forward" in m.__dict__ and _is_compiled(m) for _, m in modules if m is not inside)
    return {
        "checkpointed": tuple(again),
        "activations_offloaded": any(isinstance(module, OffloadWrapper) for _, module in modules),
        "compiled": "model" if _is_compiled(inside) else "blocks" if inner else None,
    }


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile made the module's forward."""
    return isinstance(module.__dict__.get("forward"), CompiledForward)


def fsdp1_settings(model: FullyShardedDataParallel) -> dict[str, Any]:
    """Return what holds for an FSDP1 model as one, by the names of the description."""
    ahead = model.backward_prefetch
    return {
        "output": None,
        "buffers": dtype_name(model.mixed_precision.buffer_dtype),
        "forward_prefetch": bool(model.forward_prefetch),
        "backward_prefetch": "NO_PREFETCH" if ahead is None else ahead.name,
        "offloaded": model.cpu_offload.offload_params,
    }


def fsdp2_settings(model: nn.Module) -> dict[str, Any]:
    """Return what holds for an FSDP2 model as one, by the names of the description."""
    first: Any = next((p for p in parameters_of(model) if isinstance(p, DTensor)), None)
    groups = param_groups(model)
    return {
        "output": dtype_name(root_mixed_precision(model).output_dtype),
        "buffers": None,
        "forward_prefetch": prefetches_forward(model),
        "backward_prefetch": "BACKWARD_PRE",  # by itself, in the order that forward ran in
        "offloaded": bool(groups) and isinstance(groups[0].offload_policy, CPUOffloadPolicy) and first is not None,
    }


def own_class(module: Any) -> str:
    """Return the name of the user's class, inside of what checkpointing and sharding put around it."""
    while isinstance(module, CheckpointWrapper | OffloadWrapper):
        module = checkpointed_module(module)
    module = unwrapped(module)
    return original_class(module).__name__


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """Return torch's name of a dtype."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
