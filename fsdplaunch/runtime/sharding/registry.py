"""What this process has sharded, and how: looked up by gradient and checkpoint code. Models are held weakly."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.inspection import named_parameters, unwrapped
from fsdplaunch.runtime.plugin import FullyShardedDataParallelPlugin
from fsdplaunch.runtime.sharding.mesh import data_mesh
from fsdplaunch.runtime.sharding.settings import Settings

AVERAGED = "fsdplaunch_averaged"
"""An attribute of parameters that are not sharded and whose gradients are averaged."""

fsdp1_units: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Every wrapper of FSDP1 that was made in a run, by whomever."""


class ReplicatedParams:
    """The trained parameters that are not sharded, whose gradients are averaged so that they stay equal.

    Torch leaves the gradients of ignored parameters as each rank computed them, so replicas drift apart from the
    first step on. Each gradient is averaged over all ranks of the mesh as soon as backward has added to it. Doing
    so after every backward of an accumulation is right, too: what was averaged before is equal everywhere.
    Without a mesh these are all ranks.
    """

    def __init__(self, params: Sequence[nn.Parameter], mesh: DeviceMesh | None) -> None:
        self.paused = False  # whether gradients are left alone for now (`no_sync`)
        self.groups: list[dist.ProcessGroup | None] = [None]
        if mesh is not None:
            data = data_mesh(mesh)  # ranks that split layers together have equal gradients
            self.groups = [data.get_group(axis) for axis in range(data.ndim)]
        for param in params:
            setattr(param, AVERAGED, True)
            param.register_post_accumulate_grad_hook(self._average)

    def _average(self, param: torch.Tensor) -> None:
        if self.paused or param.grad is None:
            return
        for group in self.groups:
            dist.all_reduce(param.grad, group=group)
            param.grad.div_(dist.get_world_size(group))


def keep_equal(params: Iterable[nn.Parameter], mesh: DeviceMesh | None) -> int:
    """Send the first rank's values of parameters that nobody shards, and average their gradients from now on.

    Returns:
        How many elements are in those that were not kept equal before.
    """
    new = [param for param in params if not hasattr(param, AVERAGED)]
    ranks = RankGroup(ReplicatedParams(new, mesh).groups)
    for param in new:
        ranks.send(param.data)
    return sum(param.numel() for param in new)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """How one model was sharded; names are those of the model before."""

    plugin: FullyShardedDataParallelPlugin  # what the settings came from; it says how to save
    settings: Settings
    mesh: DeviceMesh
    device: torch.device  # where this worker computes
    tied: tuple[tuple[str, ...], ...]  # the names of each parameter that has several
    units: tuple[str, ...]  # without the model itself
    ignored: tuple[str, ...]  # modules
    left_out: frozenset[str]  # the parameters that are not sharded
    methods: tuple[str, ...]  # beside forward, that parameters are gathered for
    converted: int  # linear layers that compute in float8
    replicas: ReplicatedParams | None
    split: Any = None  # the plan by which layers are split over ranks, of that feature's own class
    sequences: Any = None  # likewise for sequences


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
