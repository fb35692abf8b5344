"""Numbers read from sharded tensors are those of the whole tensor.

Needed because torch's `item` of a norm, sum or mean of shards gives this worker's part of it, without a word, and
because formatting, `tolist` and `numpy` refuse sharded tensors. A sum over a parameter is a plain number at once,
so that a penalty on the weights can be added to the loss.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.job import Job
from fsdplaunch.runtime.auto.patching import replaced

_READERS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__format__", "__array__")
_REDUCTIONS = ("sum", "mean", "norm", "std", "var", "max", "min", "amax", "amin", "prod", "any", "all")


@contextmanager
def reading_whole(job: Job) -> Iterator[None]:
    """Gather before a number is read. Collective: every worker runs the line that reads."""

    def reader(name: str) -> Any:
        read = getattr(torch.Tensor, name)

        def read_whole(self: DTensor, *args: Any, **kwargs: Any) -> Any:
            return read(self.full_tensor() if job.ownership.ours else self, *args, **kwargs)

        return lambda _: read_whole

    def reduction(name: str) -> Any:
        reduce = getattr(torch.Tensor, name)

        def reduce_whole(self: DTensor, *args: Any, **kwargs: Any) -> Any:
            result = reduce(self, *args, **kwargs)
            whole = job.ownership.ours and isinstance(result, DTensor) and result.dim() == 0
            return result.full_tensor() if whole else result

        return lambda _: reduce_whole

    with ExitStack() as stack:
        for name in _READERS:
            stack.enter_context(replaced(DTensor, name, reader(name)))
        for name in _REDUCTIONS:
            stack.enter_context(replaced(DTensor, name, reduction(name)))
        yield
