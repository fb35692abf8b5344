"""Record whether this process ever sharded a model, whoever did it: this package, a library, the script.

The moment is recorded, not the objects: a model may be gone by the time the script ends.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from fsdplaunch.config.environment import ALLOW_UNSHARDED
from fsdplaunch.errors import NeverShardedError, ShardingError
from fsdplaunch.run_dir import SHARDED
from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.device import joined_by_script
from fsdplaunch.runtime.late_modules import WEIGHTS_USED, call_if_imported
from fsdplaunch.runtime.library_watch import built_library, tell_listeners
from fsdplaunch.runtime.rank import own_folder, world_size

_seen: list[str] = []
_replicated: list[str] = []
_begun: list[str] = []


def ever_sharded() -> bool:
    """Return whether a model was sharded in this process."""
    return bool(_seen)


def sharded_by() -> str | None:
    """Return what sharded or replicated a model first in this process, or None."""
    return next(iter([*_begun, *_seen, *_replicated]), None)


def begin_sharding(how: str) -> None:
    """Note that something is about to shard a model: it, and not what it calls, is who shards."""
    _begun.append(how)
    tell_listeners()


def mark_sharded(how: str) -> None:
    """Note that a model was sharded, in memory and, once, as a file for the launcher.

    The file serves scripts that leave through `os._exit`, where nothing of ours runs any more.
    """
    if not _seen and (folder := own_folder()) is not None:
        (folder / SHARDED).touch()
    _seen.append(how)
    tell_listeners()


def watch_sharding() -> None:
    """Start to notice torch's ways to shard, and to divide a model's layers or their tensors over ranks.

    `fully_shard` makes one subclass of FSDPModule per model class and is imported by name all over the place, so
    the making of that subclass is the one point every caller passes. FSDP1 is a class: its constructor. What
    divides layers is a function that no module of torch's has by name but its own package.
    """
    from torch.distributed import tensor
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import parallel
    from torch.nn.parallel import DistributedDataParallel

    if "__init_subclass__" in FSDPModule.__dict__:
        return
    FSDPModule.__init_subclass__ = classmethod(_subclass_made)  # type: ignore[assignment]
    _after_construction(FullyShardedDataParallel, mark_sharded)
    _after_construction(DistributedDataParallel, _replicated.append)
    _after_call("parallelize_module", parallel, parallel.api)
    _after_call("distribute_module", tensor)
    once_imported(
        "torch.distributed.pipelining.stage", lambda stage: _after_construction(stage.PipelineStage, mark_sharded)
    )


def _after_construction(wrapper: Any, mark: Callable[[str], None]) -> None:
    construct = wrapper.__init__

    @functools.wraps(construct)
    def construct_and_mark(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        mark(wrapper.__name__)

    wrapper.__init__ = construct_and_mark


def _after_call(name: str, *modules: Any) -> None:
    divide = getattr(modules[0], name)

    @functools.wraps(divide)
    def divide_and_mark(*args: Any, **kwargs: Any) -> Any:
        divided = divide(*args, **kwargs)
        mark_sharded(name)
        return divided

    for module in modules:
        setattr(module, name, divide_and_mark)


def _subclass_made(cls: Any, /, **kwargs: Any) -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.nn import Module

    super(FSDPModule, cls).__init_subclass__(**kwargs)
    if issubclass(cls, Module):  # torch's own helper classes are no models
        mark_sharded("fully_shard")


def check_sharded(name: str) -> None:
    """Raise when the script named `name` ended and no model was ever sharded in this process.

    Raises:
        NeverShardedError: Always then, unless FSDPLAUNCH_ALLOW_UNSHARDED=1.
        ShardingError: The configuration's weights were never read.
    """
    _check_weights_used(name)
    if not may_stay_unsharded():
        raise never_sharded(name, "; found at its end, for no optimizer of torch made a step")


def may_stay_unsharded() -> bool:
    """Return whether a model was sharded in this process, or none needs to be."""
    return ever_sharded() or os.environ.get(ALLOW_UNSHARDED) == "1"


def never_sharded(name: str, where: str = "", also: str = "") -> NeverShardedError:
    """Return the error for a script named `name` that trained replicas, with what shards in its own way.

    Args:
        name: The script's.
        where: What is to be said of the place, if it is known.
        also: What else would have the model sharded.
    """
    msg = f"{name} ended without sharding a model{_who_trained_what()}{where}"
    library = built_library()
    ways = "call fsdplaunch.prepare(model, ...) in the script" if library is None else library.remedy
    if library is None and _replicated:
        ways = f"set launch.shard to auto, so that what is given to {_replicated[0]} is sharded; or {ways}"
    elif library is None and joined_by_script():
        ways = (
            "the script joined a process group and gives no model to DistributedDataParallel, whose models are"
            " sharded: give it that; or launch with --shard always, if ranks divide nothing by hand, or with"
            " --shard off, which leaves all to the script"
        )
    ways = f"{ways}; {also}" if also else ways
    return NeverShardedError(msg, hint=f"{ways}; or launch with --allow-unsharded, if that is meant")


def _who_trained_what() -> str:
    workers = world_size()
    if workers == 1:
        return f": its worker held all of it ({_replicated[0]})" if _replicated else ""
    trained = f"each held a full replica ({_replicated[0]})" if _replicated else "trained independent replicas"
    return f": {workers} workers {trained}"


def _check_weights_used(name: str) -> None:
    """Raise when the configuration names pretrained weights and the script never had them loaded."""
    from fsdplaunch.config.environment import decode

    weights = decode().checkpoint.weights
    if weights is None or call_if_imported(WEIGHTS_USED):
        return
    msg = f"{name} ended and checkpoint.weights ({weights}) was never read: no model was prepared by fsdplaunch"
    hint = "call fsdplaunch.prepare(model) or fsdplaunch.load_weights(model), or leave checkpoint.weights out"
    raise ShardingError(msg, hint=hint)
