"""What this process has sharded, and how: looked up by gradient and checkpoint code. Models are held weakly."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.runtime.inspection.parameter_names import named_parameters, unwrapped
from fsdplaunch.runtime.plugin.plugin import FullyShardedDataParallelPlugin
from fsdplaunch.runtime.sharding.replicated import ReplicatedParams
from fsdplaunch.runtime.sharding.settings import Settings

if TYPE_CHECKING:
    from fsdplaunch.runtime.context_parallel.split_blocks import SplitSequences
    from fsdplaunch.runtime.tensor_parallel.split_plan import SplitPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """How one model was sharded.

    Attributes:
        plugin: What the settings came from; it tells how to save.
        settings: As configured.
        mesh: The ranks' layout.
        device: Where this worker computes.
        tied: Names of each parameter that has several, as in the model before sharding.
        units: Names of the units, without the model itself.
        ignored: Names of the ignored modules.
        left_out: Names of the parameters that are not sharded.
        methods: The methods, beside forward, that parameters are gathered for.
        converted: How many linear layers compute in float8.
        replicas: The unsharded trained parameters, if there are any.
        split: How its layers are split over ranks, if they are.
        sequences: How its sequences are, if they are.
    """

    plugin: FullyShardedDataParallelPlugin
    settings: Settings
    mesh: DeviceMesh
    device: torch.device
    tied: tuple[tuple[str, ...], ...]
    units: tuple[str, ...]
    ignored: tuple[str, ...]
    left_out: frozenset[str]
    methods: tuple[str, ...]
    converted: int
    replicas: ReplicatedParams | None
    split: SplitPlan | None = None
    sequences: SplitSequences | None = None


_models: weakref.WeakKeyDictionary[nn.Module, ShardedModel] = weakref.WeakKeyDictionary()


def register_model(model: nn.Module, prepared: ShardedModel) -> None:
    """Note that `model` was sharded."""
    _models[model] = prepared


def registered(model: nn.Module) -> ShardedModel | None:
    """Return how `model`, or the module torch.compile wrapped, was sharded; None when not by this package."""
    return _models.get(model) or _models.get(unwrapped(model))


def known_parameters() -> dict[int, str]:
    """Return the clean names of all parameters of all prepared models that are alive, by the parameter's id."""
    return {id(param): name for model in _models for name, param in named_parameters(model)}


def models_of(kind: type) -> list[nn.Module]:
    """Return the prepared models that are alive and of a class."""
    return [model for model in _models if isinstance(model, kind)]
