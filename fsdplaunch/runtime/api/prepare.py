"""`prepare`: shard models, and fit optimizers, loaders and schedulers to them."""

import os
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fsdplaunch.config.environment import decode
from fsdplaunch.config.resolve import shards_on_xla
from fsdplaunch.errors import ShardingError
from fsdplaunch.features import XLA, feature
from fsdplaunch.probe.torch_version import mismatch
from fsdplaunch.run_dir import RUN_DIR
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.gloo import wait_for_gloo_at_exit
from fsdplaunch.runtime.collectives.waits import watch_main_thread
from fsdplaunch.runtime.inspection.units import is_sharded
from fsdplaunch.runtime.loading.pretrained import pretrained_for
from fsdplaunch.runtime.plugin import FullyShardedDataParallelPlugin, ambient_plugin
from fsdplaunch.runtime.rank import DataRanks
from fsdplaunch.runtime.sharding.mesh import data_ranks, shard_target
from fsdplaunch.runtime.sharding.optimizers import repoint, step_with_local_shards
from fsdplaunch.runtime.sharding.registry import known_parameters
from fsdplaunch.runtime.sharding.shard import shard_model
from fsdplaunch.runtime.state_dict.deepcopy import allow_deepcopy_of_units


def prepare(
    *objects: Any,
    plugin: FullyShardedDataParallelPlugin | None = None,
    mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    weights: str | os.PathLike[str] | Literal[False] | None = None,
    strict: bool | None = None,
) -> Any:
    """Shard models and fit everything that goes with them, on this rank and on all others alike.

    Takes any number of models, optimizers, data loaders and schedulers in any order. For each model, in this
    order: the ranks compare their settings; parameters shared between modules are found by identity; ignored
    modules are matched; linear layers become float8 ones, if configured; units are chosen; blocks are wrapped for
    activation checkpointing, then compiled; unit by unit, bottom-up, tensors get storage on the device, rank 0's
    values (so that all ranks start from one model) and the master dtype, and are sharded. Then optimizers
    are moved to the sharded parameters, by name and with their state, and everything is checked: the shards of all
    ranks add up to the full model, replicas are alike, and every optimizer trains prepared parameters only.
    `describe` returns what came out.

    Args:
        objects: Models, optimizers, data loaders and schedulers. Models already sharded stay as they are.
        plugin: How to shard; the one made of the launch's configuration when left out.
        mesh: The ranks' layout, if it is not to be made from the plugin: one axis, or replicas x shards.
        process_group: The ranks to shard over, as another way to give a mesh of one axis.
        device: Where to compute; this worker's own when left out. `meta` shards without memory and values, to look
            at the layout (FSDP2).
        weights: A folder of pretrained weights, or one file, for the one model given. It may be built on the meta
            device: it is sharded without memory, and every rank reads only its own shards. `checkpoint.weights` of
            the configuration when left out; False for none in spite of it.
        strict: Whether tensors missing in the files or left over in them are errors, as in torch's
            `load_state_dict`; `checkpoint.weights_strict` when left out.

    Returns:
        The objects in the order given: the object itself for one, a tuple for several. FSDP2 changes models in
        place; FSDP1 returns a wrapper around them.

    Raises:
        MachineError: This torch is too old.
        ShardingError: A model cannot be sharded as configured, or an optimizer trains parameters of another one.
        CheckpointError: The weights cannot be read, or are of another model; raised on every rank.
        UsageError: An environment variable holds none of its key's values, or weights are given for no model or
            for several.
    """
    wait_for_gloo_at_exit()
    watch_main_thread()
    _check_torch()
    chosen = plugin or ambient_plugin()
    if shards_on_xla(decode()):
        unsupported = {"mesh": mesh, "process_group": process_group, "device": device, "weights": weights}
        results = feature(XLA).prepare_on_xla(objects, chosen, unsupported)
    else:
        place = shard_target(chosen.settings(), mesh=mesh, process_group=process_group, device=device)
        models = _of(objects, nn.Module)
        pretrained = pretrained_for(models, weights=weights, strict=strict)
        deferred = None
        if pretrained:
            from fsdplaunch.runtime.loading.load import DeferredWeights

            deferred = partial(DeferredWeights, where=pretrained.where, strict=pretrained.strict)
        ready: dict[int, nn.Module] = {}
        for model in models:
            if not is_sharded(model):
                ready[id(model)] = shard_model(model, chosen, place, deferred)
                allow_deepcopy_of_units(ready[id(model)])
                continue
            ready[id(model)] = model
            if weights:
                from fsdplaunch.runtime.loading.load import load_weights

                load_weights(model, weights, strict=strict)
        known, readers = known_parameters(), data_ranks(place.mesh, place.context)
        for optimizer in _of(objects, Optimizer):
            repoint(optimizer, known)
        step_with_local_shards()  # also optimizers that are built later
        results = tuple(ready[id(item)] if id(item) in ready else fit(item, readers) for item in objects)
    return results[0] if len(results) == 1 else results


@cache
def _check_torch() -> None:
    """Refuse a torch that is too old, and warn about one that was not tested, unless the launcher has."""
    found = mismatch(torch.__version__)
    if found is not None:
        found.raise_if_fatal()
        if RUN_DIR not in os.environ:
            messages.say(found.note)


def _of(objects: tuple[Any, ...], kind: type) -> list[Any]:
    return list({id(item): item for item in objects if isinstance(item, kind)}.values())


def fit(item: Any, readers: DataRanks) -> Any:
    """Fit what `prepare` was given beside models and optimizers; loaders to this worker among those that read."""
    if isinstance(item, DataLoader):
        from fsdplaunch.runtime.data_loaders import shard_loader

        return shard_loader(item, readers)
    if hasattr(item, "state_dict"):
        return item  # a scheduler keeps its optimizer, and the optimizer is the same object as before
    msg = f"prepare does not know what to do with {type(item).__name__}"
    raise ShardingError(msg, hint="give it models, optimizers, data loaders and schedulers")
