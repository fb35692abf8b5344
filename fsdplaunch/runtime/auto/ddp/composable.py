"""Refuse torch's `replicate(model)`, which puts DistributedDataParallel's hooks on a model and wraps nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.patch import replaced_once_imported
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.modules import REPLICATE


@contextmanager
def refusing_replicate(ownership: Ownership) -> Iterator[None]:
    """Exchange the function for one that names what to call, unless the script shards by itself."""

    def build(original: Any) -> Any:
        def replicate(module: Any, *args: Any, **kwargs: Any) -> Any:
            if ownership.ours is not False:
                msg = (
                    f"{script_line()} calls replicate for {type(module).__name__}, which leaves no model to shard"
                )
                ways = "give it to DistributedDataParallel instead, whose model is sharded as configured"
                raise ShardingError(
                    msg, hint=f"{ways}; or launch with --shard off, which leaves all to the script"
                )
            return original(module, *args, **kwargs)

        return replicate

    with replaced_once_imported(REPLICATE, "replicate", build):
        yield
