"""Let torch's model averagers leave shards as they are: ranks have no models of their own to average.

Needed because they flatten what each rank holds, and write the average of all ranks into it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.patch import replaced_once_imported
from fsdplaunch.runtime.script_line import script_line


@contextmanager
def averaging_replicas_only(hook_context: HookContext) -> Iterator[None]:
    """Take shards out of what `PeriodicModelAverager` and its siblings average."""

    def build(original: Any) -> Any:
        def average_parameters(params: Any, process_group: Any) -> None:
            given = list(params)
            ours = hook_context.ownership.ours
            replicas = [param for param in given if not (ours and isinstance(param, DTensor))]
            if len(replicas) < len(given):
                _tell(hook_context)
            if replicas or not given:
                original(iter(replicas), process_group)

        return average_parameters

    module = "torch.distributed.algorithms.model_averaging.utils"
    with replaced_once_imported(module, "average_parameters", build):
        yield


def _tell(hook_context: HookContext) -> None:
    """Print once that there is nothing to average.

    Raises:
        ShardingError: No DistributedDataParallel would have kept the models equal: they were to be trained apart.
    """
    if not hook_context.ownership.ranked:
        msg = f"{script_line()} averages models that ranks were to train apart, and the launch shards one model"
        hint = "launch with --shard off, which leaves all to the script; or leave the averaging out, to train one"
        raise ShardingError(msg, hint=hint)
    if "averages" not in hook_context.printed:
        hook_context.printed.add("averages")
        messages.say(
            f"{script_line()}: averaging a sharded model has no effect: its gradients are averaged at each step"
        )
