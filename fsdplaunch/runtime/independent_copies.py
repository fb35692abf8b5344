"""Refuse workers that each train a copy of their own and write the same files, at the first optimizer step."""

import os
from typing import Any

from fsdplaunch.config.environment import ALLOW_UNSHARDED
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.step_hooks import before_first_step


def refuse_independent_copies() -> None:
    """Look at the first optimizer step whether this worker is in a group with the others.

    For runs whose script distributes itself.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get(ALLOW_UNSHARDED) != "1":
        once_imported("torch.optim.optimizer", _watch_first_step)


def _watch_first_step(optimizers: Any) -> None:
    before_first_step(optimizers, _check_group)


def _check_group() -> None:
    """Raise when no process group was made.

    Raises:
        ShardingError: With the line of the step.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return
    from fsdplaunch.runtime.script_line import script_line

    workers = os.environ.get("WORLD_SIZE")
    msg = (
        f"{script_line()} trains alone: each of the {workers} workers has a model of its own, in no process group"
    )
    hint = (
        "set distributed_type to FSDP to have it sharded, or num_processes to 1, or launch with --allow-unsharded"
    )
    raise ShardingError(msg, hint=hint)
