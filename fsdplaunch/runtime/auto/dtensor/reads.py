"""Reads of shards by the script: by all ranks, or by rank 0 alone, as in `if rank == 0: print(p.norm())`."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.auto.dtensor.row_loops import put_kept_rows
from fsdplaunch.runtime.auto.dtensor.shard_handlers import averaged
from fsdplaunch.runtime.auto.dtensor.shard_parts import outside_of_inference_mode
from fsdplaunch.runtime.auto.state.gather import ShardGatherer
from fsdplaunch.runtime.auto.state.rank0.copies import in_optimizer_step
from fsdplaunch.runtime.auto.state.rank0.fetching import COMPUTING
from fsdplaunch.runtime.auto.state.rank0.position import Position
from fsdplaunch.runtime.auto.state.rank0.pulling import rank0_saves
from fsdplaunch.runtime.auto.state.rank0.shard_names import is_over_all_ranks
from fsdplaunch.runtime.auto.state.saving_threads import in_thread_of_torch, in_turn
from fsdplaunch.runtime.script_line import calling_lines, calling_stack, is_user_file
from fsdplaunch.runtime.torch_internals.tensors import tree_leaves, tree_map

_together: set[tuple[str | int, ...]] = set()
"""The calls that all ranks were seen to make together; asked once, as a read may stand in every step.

The script's and libraries', with those that led to them: a function that all ranks have called may be called by
rank 0 alone elsewhere.
"""
_alone_at: tuple[Any, ...] | None = None
"""The line at which rank 0 was seen to read alone, and how far it was: its next shards are read so, too."""


def by_all_or_rank0(compute: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Return a handler that knows, at a line's first read, whether all ranks have come to it.

    Where rank 0 alone has, the others hand over their shards while they wait for it, as for a save.

    Args:
        compute: The handler for all ranks together; collective.
    """

    def read(func: Any, args: Any, kwargs: Any) -> Any:
        put_kept_rows()
        return _computed(f"{func.__name__}() of a shard", compute, func, args, kwargs)

    return read


def operator_by_all_or_rank0(compute: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Return a handler of an operator of torch's that rank 0 alone computes of full tensors: it gets a plain one.

    What it computes with next is plain, then: `if rank == 0: print(weight.t() @ weight, weight.topk(2).values)`.

    Args:
        compute: The handler for all ranks together.
    """

    def compute_operator(op: Any, args: Any, kwargs: Any) -> Any:
        if _deciding.done or rank0_saves() is None or in_optimizer_step():
            return compute(op, args, kwargs)
        if _is_known():
            return _without_looking(compute, op, args, kwargs)
        if not _may_be_alone(args, kwargs):
            return compute(op, args, kwargs)
        return _computed(COMPUTING, compute, op, args, kwargs)

    return compute_operator


def _may_be_alone(args: Any, kwargs: Any) -> bool:
    """Return whether rank 0 could have the others hand over what an operator is given."""
    if in_thread_of_torch():
        return False
    shards = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
    return all(map(is_over_all_ranks, shards))


def _computed(call: str, compute: Callable[[Any, Any, Any], Any], func: Any, args: Any, kwargs: Any) -> Any:
    """Compute by all ranks, or with full tensors by rank 0 alone.

    Args:
        call: What needs the full tensors, for errors.
        compute: By all ranks.
        func: The function, method or operator.
        args: What it is given.
        kwargs: What it is given by name.
    """
    if _deciding.done or torch.compiler.is_compiling() or rank0_saves() is None:
        return compute(func, args, kwargs)
    if _is_known():
        return _without_looking(compute, func, args, kwargs)
    with in_turn(call), decided():
        alone = _alone_at_this_line(call)
        return compute(func, args, kwargs) if alone is None else _alone(alone, func, args, kwargs)


@contextmanager
def decided() -> Iterator[None]:
    """Have what is computed inside of a function's or an operator's handler not be looked at by itself."""
    before, _deciding.done = _deciding.done, True
    try:
        yield
    finally:
        _deciding.done = before


class _Deciding(threading.local):
    done = False


_deciding = _Deciding()


def _alone_at_this_line(call: str) -> ShardGatherer | None:
    """Return what fetches shards where rank 0 alone has come to the line that runs; None for all ranks.

    Collective, at a line's first time.
    """
    saves = rank0_saves()
    calls = calling_stack()
    if saves is None or calls in _together:
        return None
    gathering = ShardGatherer(call, keep=True, at=calling_lines())
    if not _come_together(gathering, calls, saves.position):
        return gathering
    _together.add(calls)
    return None


def _is_known() -> bool:
    """Return whether all ranks have come together to the call that the main thread makes."""
    return threading.get_ident() == threading.main_thread().ident and calling_stack() in _together


def _without_looking(compute: Callable[[Any, Any, Any], Any], func: Any, args: Any, kwargs: Any) -> Any:
    """Compute inside of `decided`, without what a context costs for each operator."""
    _deciding.done = True
    try:
        return compute(func, args, kwargs)
    finally:
        _deciding.done = False


def full_by_all_or_rank0(ownership: Ownership, gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `full_tensor` that a script may also call on rank 0 alone, whoever has sharded the tensor.

    Args:
        ownership: Who has.
        gather: Torch's; collective. Libraries keep it as it is: they call it where all ranks come.
    """

    def full_tensor(full: torch.Tensor, **_: Any) -> torch.Tensor:
        return full

    def gathered(_: Any, args: Any, kwargs: Any) -> Any:
        full = gather(*args, **kwargs)
        return averaged(full, args[0].device_mesh) if ownership.ours else full

    read = by_all_or_rank0(gathered)

    @wraps(gather)
    def gather_or_fetch(tensor: DTensor, **kwargs: Any) -> Any:
        put_kept_rows()
        by_script = is_user_file(sys._getframe(1).f_code.co_filename)
        if not by_script or rank0_saves() is None or not is_over_all_ranks(tensor):
            return gather(tensor, **kwargs)
        return read(full_tensor, (tensor,), kwargs)

    return gather_or_fetch


def _come_together(gathering: ShardGatherer, calls: tuple[str | int, ...], position: Position) -> bool:
    global _alone_at  # noqa: PLW0603  (one script, one position)
    at = (calls, *position.counts(), position.steps, *position.met)
    if at == _alone_at:
        gathering.together = False
    else:
        gathering.meet()
        _alone_at = None if gathering.together else at
    return gathering.together


def _alone(gathering: ShardGatherer, func: Any, args: Any, kwargs: Any) -> Any:
    def full(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return gathering.gather(value).to(value.device).requires_grad_(value.requires_grad)

    with outside_of_inference_mode():
        with gathering.finish("read a shard"):
            args, kwargs = tree_map(full, (args, kwargs))
        return func(*args, **kwargs)
