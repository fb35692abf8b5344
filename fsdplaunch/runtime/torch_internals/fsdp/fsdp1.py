"""What torch's FSDP1 keeps behind its wrapper: flat parameters and their layout, strategies, wrap policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import ShardingStrategy

if TYPE_CHECKING:
    import torch
    from torch import nn

FLAT_PARAMETER = "_flat_param"
"""FSDP1's name of a flat parameter in a local state dict; all versions."""

WRAPPED_ATTRIBUTE = "_fsdp_wrapped_module"
"""Where FSDP1's wrapper holds the module; its hooks put it in front of the names in a state dict; all versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParameter:
    """What FSDP1 knows of one flat parameter; all versions.

    Attributes:
        tensor: The flat parameter itself.
        shard: This rank's shard of it, flat.
        shapes: Of the full parameters in it.
        infos: The module and the attribute of each.
        names: Their dotted names inside the unit.
        shared: The same for further places of shared parameters.
        places: Where in this rank's shard each begins and ends.
        params: The parameters that `use_orig_params` shows, else empty.
        counts: Elements of each run, padding included.
        is_padding: Whether each run is padding.
        is_contiguous: Whether each parameter lies row by row.
        strides: Of the full parameters.
        shard_numel: Elements of each rank's shard.
    """

    tensor: torch.Tensor
    shard: torch.Tensor
    shapes: Sequence[torch.Size]
    infos: Sequence[Any]
    names: Sequence[str]
    shared: Sequence[Any]
    places: Sequence[Any]
    params: Sequence[nn.Parameter]
    counts: Sequence[int]
    is_padding: Sequence[bool]
    is_contiguous: Sequence[bool]
    strides: Sequence[tuple[int, ...]]
    shard_numel: int


def flat_parameter(unit: nn.Module) -> FlatParameter | None:
    """Describe the flat parameter of one FSDP1 unit; None for a unit without parameters."""
    handle: Any = unit._handle
    if handle is None:
        return None
    flat = handle.flat_param
    return FlatParameter(
        tensor=flat,
        shard=getattr(flat, "_local_shard", flat).detach(),
        shapes=flat._shapes,
        infos=flat._param_infos,
        names=flat._fqns,
        shared=flat._shared_param_infos,
        places=flat._shard_param_infos,
        params=flat._params or (),
        counts=flat._numels_with_padding,
        is_padding=flat._is_padding_mask,
        is_contiguous=flat._contiguities,
        strides=flat._strides,
        shard_numel=flat._sharded_size.numel(),
    )


def show_unsharded_parameters(unit: Any) -> None:
    """Let an FSDP1 unit that is not sharded (NO_SHARD) hold its parameters as such after a pass; all versions.

    Torch leaves tensors in their places where all of them are frozen and no input has a gradient.
    """
    handle = unit._handle
    if handle is not None and unit._use_orig_params and not handle.uses_sharded_strategy:
        handle._use_sharded_views()


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a flat parameter of FSDP1; all versions."""
    return bool(getattr(tensor, "_is_flat_param", False))


def is_in_flat_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a flat parameter of FSDP1, or a parameter that lies in one; all versions."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def divided_over(unit: Any) -> int:
    """Return over how many ranks a unit's parameters are divided, with those of replicas; all versions."""
    replicas = getattr(unit, "_inter_node_pg", None)
    return int(unit.process_group.size() * (1 if replicas is None else replicas.size()))


def shows_original_parameters(model: nn.Module) -> bool:
    """Return whether an FSDP1 model was made with `use_orig_params`; all versions."""
    return bool(model._use_orig_params)


@contextmanager
def without_mesh(units: Sequence[Any]) -> Iterator[None]:
    """Have FSDP1 forget the mesh its units were made with: with one it writes no local state; all versions."""
    meshes = [unit._device_mesh for unit in units]
    for unit in units:
        unit._device_mesh = None
    try:
        yield
    finally:
        for unit, mesh in zip(units, meshes, strict=True):
            unit._device_mesh = mesh


def sharding_strategy(name: str) -> Any:
    """Return FSDP1's strategy by the name the configuration has; HYBRID_SHARD_ZERO2 is private in all versions."""
    return ShardingStrategy["_HYBRID_SHARD_ZERO2" if name == "HYBRID_SHARD_ZERO2" else name]


def wrap_policy_runner(policy: Any) -> Callable[..., Any] | None:
    """Return how a policy object of torch chooses modules; None for a function; all versions."""
    return getattr(policy, "_run_policy", None)
