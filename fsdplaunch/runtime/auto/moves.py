"""Moving or casting a sharded model keeps the hooks of its parameters.

Needed because torch exchanges sharded parameters underneath the Python objects, and leaves at the old ones what
`register_hook` registered: the script's own hooks, and those that fit gradients to the shards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp import FSDPModule

from fsdplaunch.runtime.auto.job import Job
from fsdplaunch.runtime.auto.patching import replaced
from fsdplaunch.runtime.fitting import fit_gradients
from fsdplaunch.runtime.torch_internals import MOVE_METHOD


@contextmanager
def keeping_hooks(job: Job) -> Iterator[None]:
    """Connect hooks again after a sharded model was moved."""

    def move(original: Any) -> Any:
        def move_and_fit(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if job.ownership.ours:
                fit_gradients(self)
            return result

        return move_and_fit

    with replaced(FSDPModule, MOVE_METHOD, move):
        yield
