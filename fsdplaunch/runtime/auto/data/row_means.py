"""Remember which tensors are means or sums over a batch's rows, of which each rank has its own.

Needed because what a model chooses by them has no gradients: TimesNet's periods, Autoformer's delays. A mark stays
with the tensor, and with what is averaged of it further.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.tensors import is_function_transforms

_MARK = "fsdplaunch_mean_of_rows"


@contextmanager
def marking_row_means(hook_context: HookContext) -> Iterator[None]:
    """Mark what `mean` and `sum` make of the rows of a batch."""
    with ExitStack() as stack:
        for owner in (torch, torch.Tensor):
            for name in ("mean", "sum"):
                stack.enter_context(replaced(owner, name, lambda original: _marking(original, hook_context)))
        yield


def is_row_mean(value: Any) -> bool:
    """Return whether a tensor is a mean or a sum over a batch's rows."""
    return type(value) is torch.Tensor and hasattr(value, _MARK)


def _marking(original: Any, hook_context: HookContext) -> Any:
    batches = hook_context.batches

    @wraps(original)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if torch.compiler.is_compiling() or not batches.sizes or type(result) is not torch.Tensor:
            return result
        value, dim = kwargs.get("input", args[0] if args else None), kwargs.get("dim", args[1:2])
        if result.dim() and (is_row_mean(value) or _has_rows(value, dim, batches.sizes)):
            setattr(result, _MARK, True)
        return result

    return reduce


def _has_rows(value: Any, dim: Any, sizes: Any) -> bool:
    """Return whether rows of the batch, in the first dimension, are among what is reduced."""
    dims = dim[0] if isinstance(dim, tuple) and len(dim) == 1 else dim
    along = dims == 0 if isinstance(dims, int) else isinstance(dims, list | tuple) and 0 in dims
    if type(value) is not torch.Tensor or not along or is_function_transforms(value):
        return False
    return value.dim() > 1 and value.size(0) in sizes
