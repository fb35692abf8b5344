"""Tell where a script puts the rows of its batch into another order, to mix them with each other as mixup does.

Needed because each rank has its own rows only: one process mixes each with any other row of the batch.
"""

import random
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line

_MIXED = "rows of the batch are put into another order: each rank mixes its own rows only"


@contextmanager
def telling_row_orders(hook_context: HookContext) -> Iterator[None]:
    """Look at what orders rows: a random permutation of as many as this rank has, or theirs flipped or rolled."""
    if not hook_context.keeps_batch or hook_context.data.size == 1:
        yield
        return
    with ExitStack() as stack:
        for owner, name, rows_of in _ORDERING:
            stack.enter_context(replaced(owner, name, partial(telling_order, hook_context, rows_of)))
        yield


def telling_order(context: HookContext, rows_of: Callable[[Any, Any], int | None], original: Any) -> Any:
    """Make a function that tells its line where it orders as many rows as this rank has.

    Args:
        context: This worker's.
        rows_of: Tells by the arguments how many rows are ordered; None for none.
        original: What orders them.
    """

    @wraps(original)
    def order(*args: Any, **kwargs: Any) -> Any:
        if (
            trains_on_batch(context)
            and rows_of(args, kwargs) in context.batches.sizes
            and not _is_of_model(context, args)
        ):
            tell_once(context, "order", _MIXED)
        return original(*args, **kwargs)

    return order


def _is_of_model(context: HookContext, args: Any) -> bool:
    """Return whether what is ordered is a model's own buffer, such as a filter that a pass flips: no rows."""
    models = list(context.models)
    return bool(args) and any(args[0] is buffer for model in models for buffer in model.buffers())


def trains_on_batch(context: HookContext) -> bool:
    """Return whether the script has a training batch before it, and does not read it just now."""
    return is_between_reads(context) and not context.evaluating()


def is_between_reads(context: HookContext) -> bool:
    """Return whether the launcher shards for the script, which does not read a batch just now."""
    reads = context.streams.alike or context.streams.draws_own or get_worker_info() is not None
    return not reads and bool(context.ownership.ours)


def tell_once(context: HookContext, kind: str, sentence: str) -> None:
    """Print that the script's line does what one process would not, the first time that it does."""
    line = script_line()
    if f"{kind} {line}" not in context.printed:
        context.printed.add(f"{kind} {line}")
        messages.say_unequal(f"{line}: {sentence}, which is not what one process computes")


def permuted(args: Any, kwargs: Any) -> int | None:
    """Return how many numbers are permuted."""
    found = args[0] if args else kwargs.get("n", kwargs.get("x"))
    if isinstance(found, Sized):
        return len(found) if getattr(found, "shape", True) else None  # an array of no dimensions has no length
    return found if isinstance(found, int) and found else None


def _sampled(args: Any, kwargs: Any) -> int | None:
    """Return how many of as many things are taken at random."""
    given, count = (*args, kwargs.get("population"), kwargs.get("k"))[:2]
    count = kwargs.get("k", count)
    return count if isinstance(given, Sized) and len(given) == count else None


def _flipped(args: Any, kwargs: Any) -> int | None:
    """Return how many rows are flipped, where it is along the first dimension."""
    given = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else args[1:]
    return _rows(args, kwargs.get("dims", given))


def _rolled(args: Any, kwargs: Any) -> int | None:
    """Return how many rows are rolled, where it is along the first dimension."""
    return _rows(args, kwargs.get("dims", args[2] if len(args) > 2 else ()))  # noqa: PLR2004


def _rows(args: Any, dims: Any) -> int | None:
    tensor = args[0] if args else None
    along = 0 in (dims if isinstance(dims, list | tuple) else (dims,))
    found = along and type(tensor) is torch.Tensor and tensor.dim() > 1
    return int(tensor.size(0)) if found and tensor is not None else None


_ORDERING: tuple[tuple[Any, str, Callable[[Any, Any], int | None]], ...] = (
    (torch, "randperm", permuted),
    *((owner, "flip", _flipped) for owner in (torch, torch.Tensor)),
    *((owner, "roll", _rolled) for owner in (torch, torch.Tensor)),
    *((np.random, name, permuted) for name in ("permutation", "shuffle")),
    (random, "shuffle", permuted),
    (random, "sample", _sampled),
)
"""What puts rows into another order, and what tells how many."""
