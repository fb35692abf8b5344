"""Numbers read from sharded tensors are those of the whole tensor.

Needed because torch's `item` of a norm, sum or mean of shards gives this worker's part of it, without a word, and
because formatting, `tolist` and `numpy` refuse sharded tensors. A sum over a parameter is a plain number at once,
so that a penalty on the weights can be added to the loss; so is any other number, when it is added.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.job import Job
from fsdplaunch.runtime.auto.patching import replaced
from fsdplaunch.runtime.torch_internals import gather_for_scripting

_READERS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__format__", "__array__")
_REDUCTIONS = ("sum", "mean", "norm", "std", "var", "max", "min", "amax", "amin", "prod", "any", "all")
_ADDITIONS = ("__add__", "__radd__", "__sub__", "__rsub__")
_FUNCTIONS = ((torch, ("sum", "mean", "norm")), (torch.linalg, ("norm", "vector_norm", "matrix_norm")))
"""What penalties are written with; in `loss += torch.norm(weight)` it is too late to ask when it is added."""


@contextmanager
def reading_whole(job: Job) -> Iterator[None]:
    """Gather before a number is read. Collective: every worker runs the line that reads."""
    made = {_READERS: _reader, _REDUCTIONS: _reduction, _ADDITIONS: _addition}
    with ExitStack() as stack:
        for names, make in made.items():
            for name in names:
                instead = make(getattr(torch.Tensor, name), job)
                stack.enter_context(replaced(DTensor, name, lambda _, instead=instead: instead))  # type: ignore[misc]
        for owner, functions in _FUNCTIONS:
            for name in functions:
                stack.enter_context(replaced(owner, name, lambda reduce: _function(reduce, job)))
        yield


def _reader(read: Any, job: Job) -> Any:
    def read_whole(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        return read(self.full_tensor() if job.ownership.ours else self, *args, **kwargs)

    return read_whole


def _reduction(reduce: Any, job: Job) -> Any:
    @wraps(reduce)
    def reduce_whole(*args: Any, **kwargs: Any) -> Any:
        result = reduce(*args, **kwargs)
        whole = job.ownership.ours and isinstance(result, DTensor) and result.dim() == 0
        return result.full_tensor() if whole else result

    return reduce_whole


def _function(reduce: Any, job: Job) -> Any:
    reduce_whole = _reduction(reduce, job)
    gather_for_scripting(reduce, reduce_whole)
    return reduce_whole


def _addition(add: Any, job: Job) -> Any:
    def add_whole(self: DTensor, other: Any) -> Any:
        plain = isinstance(other, torch.Tensor) and not isinstance(other, DTensor)
        number = job.ownership.ours and plain and self.dim() == 0
        return add(self.full_tensor() if number else self, other)

    return add_whole
