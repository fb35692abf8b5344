"""Whether this process ever sharded a model, whoever did it: this package, another library, the user's own code.

The moment is recorded, not the objects: a model may be gone by the time the script ends.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from fsdplaunch.config.environment import ALLOW_UNSHARDED
from fsdplaunch.errors import NeverShardedError, ShardingError
from fsdplaunch.run_dir import SHARDED
from fsdplaunch.runtime.late_modules import PRETRAINED, if_imported
from fsdplaunch.runtime.rank import rank_folder

_seen: list[str] = []
_copied: list[str] = []


def ever_sharded() -> bool:
    """Whether a model was sharded in this process."""
    return bool(_seen)


def sharded_by() -> str | None:
    """What sharded or copied a model first in this process, or None."""
    return next(iter([*_seen, *_copied]), None)


def mark_sharded(how: str) -> None:
    """Note that a model was sharded, in memory and, once, as a file for the launcher.

    The file serves scripts that leave through `os._exit`, where nothing of ours runs any more.
    """
    if not _seen and (folder := rank_folder()) is not None:
        (folder / SHARDED).touch()
    _seen.append(how)


def watch_sharding() -> None:
    """Start to notice both of torch's ways to shard.

    `fully_shard` makes one subclass of FSDPModule per model class and is imported by name all over the place, so
    the birth of that subclass is the one point every caller passes. The old wrapper is a class: its constructor.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    if "__init_subclass__" in FSDPModule.__dict__:
        return
    FSDPModule.__init_subclass__ = classmethod(_subclass_made)  # type: ignore[assignment]
    _after_construction(FullyShardedDataParallel, mark_sharded)
    _after_construction(DistributedDataParallel, _copied.append)


def _after_construction(wrapper: Any, mark: Callable[[str], None]) -> None:
    construct = wrapper.__init__

    @functools.wraps(construct)
    def construct_and_mark(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        mark(wrapper.__name__)

    wrapper.__init__ = construct_and_mark


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
    if ever_sharded() or os.environ.get(ALLOW_UNSHARDED) == "1":
        return
    msg = f"{name} ended without sharding a model{_who_trained_what()}"
    raise NeverShardedError(
        msg,
        hint="call fsdplaunch.prepare(model, ...) in the script, or launch with --allow-unsharded",
    )


def _who_trained_what() -> str:
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    if workers == 1:
        return f": its worker held all of it ({_copied[0]})" if _copied else ""
    trained = f"each held a whole copy ({_copied[0]})" if _copied else "trained independent copies"
    return f": {workers} workers {trained}"


def _check_weights_used(name: str) -> None:
    """Raise when the configuration names pretrained weights and the script never had them loaded."""
    from fsdplaunch.config.environment import decode

    weights = decode().checkpoint.weights
    loading = if_imported(PRETRAINED)
    if weights is None or (loading is not None and loading.weights_used()):
        return
    msg = f"{name} ended and checkpoint.weights ({weights}) was never read: no model was prepared by fsdplaunch"
    hint = "call fsdplaunch.prepare(model) or fsdplaunch.load_weights(model), or leave checkpoint.weights out"
    raise ShardingError(msg, hint=hint)
