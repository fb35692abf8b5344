"""`prepare` under PyTorch/XLA."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch_xla import runtime

from fsdplaunch.config.environment import decode
from fsdplaunch.errors import ShardingError, UsageError
from fsdplaunch.runtime.data.data_loader import shard_loader
from fsdplaunch.runtime.plugin.plugin import FullyShardedDataParallelPlugin
from fsdplaunch.runtime.rank import DataRanks
from fsdplaunch.runtime.xla import devices, gradients, saving  # noqa: F401  (the doors look for these two)
from fsdplaunch.runtime.xla.parameters import names_before, repoint
from fsdplaunch.runtime.xla.shard import shard_on_xla
from fsdplaunch.runtime.xla.watch import wrapper_classes


def prepare_on_xla(
    objects: Sequence[Any], plugin: FullyShardedDataParallelPlugin, unsupported: dict[str, Any]
) -> tuple[Any, ...]:
    """Do for PyTorch/XLA what `fsdplaunch.prepare` does; wrappers are returned in the models' places.

    Under SPMD one process has the whole batch, which is split over the devices: a loader's batch size is that of
    all devices together. Otherwise each process reads its own items.

    Args:
        objects: Models, optimizers, data loaders and schedulers.
        plugin: How to shard.
        unsupported: Arguments of `prepare` that have no meaning here, by name.

    Raises:
        UsageError: One of them is given.
        ShardingError: A model or an optimizer cannot be prepared so.
    """
    for name, value in unsupported.items():
        if value is not None and value is not False:
            msg = f"prepare({name}=...) has no meaning under PyTorch/XLA"
            raise UsageError(msg, hint="leave it out; load weights before prepare")
    config, ready = decode(), dict[int, Any]()
    known: dict[int, tuple[str, nn.Module]] = {}
    for model in _of(objects, nn.Module):
        if isinstance(model, wrapper_classes()):
            ready[id(model)] = model
            continue
        names = names_before(model)
        wrapped = shard_on_xla(model, plugin.settings(), config)
        ready[id(model)] = wrapped
        known |= {number: (name, wrapped) for number, name in names.items()}
    for optimizer in _of(objects, Optimizer):
        repoint(optimizer, known)
        optimizer.register_step_post_hook(lambda *_: devices.run_step())
        ready[id(optimizer)] = optimizer
    return tuple(ready[id(item)] if id(item) in ready else _fit(item) for item in objects)


def _of(objects: Sequence[Any], kind: type) -> list[Any]:
    return list({id(item): item for item in objects if isinstance(item, kind)}.values())


def _fit(item: Any) -> Any:
    if isinstance(item, DataLoader):
        readers = DataRanks(rank=0, size=1)  # under SPMD every process has the same items
        if not devices.is_spmd():
            readers = DataRanks(rank=runtime.global_ordinal(), size=runtime.world_size())
        return shard_loader(item, readers)
    if hasattr(item, "state_dict"):
        return item
    msg = f"prepare does not know what to do with {type(item).__name__}"
    raise ShardingError(msg, hint="give it models, optimizers, data loaders and schedulers")
