"""Give torch functions that a plain script calls with shards, outside the model, the handlers that compute them.

Needed because torch gives this rank's value without a word, gives a wrong one, or refuses. None of this is in a
model's own passes, where parameters are full: it is penalties, statistics, and updates written by hand.

The table is installed by name and not as `DTensor.__torch_function__`: torch would call that for every attribute
that FSDP2 and the optimizers read of a parameter too, some twelve times per parameter and step.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.auto.dtensor import shard_handlers as handlers
from fsdplaunch.runtime.auto.dtensor import shard_parts, shard_writes
from fsdplaunch.runtime.auto.dtensor.cut_parts import PartsWithGradients, detached
from fsdplaunch.runtime.auto.dtensor.full_mixtures import FUNCTIONS, METHODS, compute_full, with_plain, with_shards
from fsdplaunch.runtime.auto.dtensor.operator_table import EXTREMES, OperatorTable
from fsdplaunch.runtime.auto.dtensor.reads import by_all_or_rank0, full_by_all_or_rank0
from fsdplaunch.runtime.auto.dtensor.row_loops import rows
from fsdplaunch.runtime.auto.dtensor.shared_memory import read_only, refuse_memory
from fsdplaunch.runtime.auto.dtensor.updates import WrappedUpdates, make_into
from fsdplaunch.runtime.auto.model.written_in_passes import take_data
from fsdplaunch.runtime.auto.state.rank0.writes_after_steps import WritesAfterSteps
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.dtensor import knows_operator

Handler = handlers.Handler

_READS = (
    "item",
    "tolist",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "__format__",
)
_REDUCTIONS = ("sum", "mean", "norm", "std", "var", *EXTREMES, "prod", "any", "all")
_ADDITIONS = ("__add__", "__radd__", "__sub__", "__rsub__")
_DRAWS = ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_", "geometric_")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new")
_LIKE = ("randn_like", "rand_like", "randint_like", "bernoulli", "normal")
_FUNCTIONS = (
    *((torch, name) for name in ("sum", "mean", "norm", *EXTREMES)),
    *((torch.linalg, name) for name in ("norm", "vector_norm", "matrix_norm")),
)
"""What penalties are written with; in `loss += torch.norm(weight)` it is too late to gather when it is added."""
_SHAPES = ("reshape", "flatten", "ravel")
_CUTS = (
    *("unbind", "chunk", "split", "split_with_sizes"),
    *(() if knows_operator(torch.ops.aten.select.int) else ("select",)),
)
"""Parts of which torch knows no gradient where a shard is cut; 2.7 takes no row of any."""


@contextmanager
def handling_shards(hook_context: HookContext) -> Iterator[None]:
    """Install the handlers; they compute where the launcher shards for the script."""
    ours = hook_context.ownership
    data: Any = torch.Tensor.data
    writes = WritesAfterSteps(hook_context)
    assign = writes.waiting(partial(handlers.assign_data, hook_context.models))
    set_data = _handled(data.__set__, assign, ours)
    table = OperatorTable(ours, writes)
    parts = PartsWithGradients(table.see_writes)
    cut_parts, take_shape = by_all_or_rank0(parts), by_all_or_rank0(parts.shape)
    with ExitStack() as stack:
        updates = WrappedUpdates(ours, stack)
        for name, handler in _mixing(FUNCTIONS, hook_context, {"add": handlers.add, "sub": handlers.add}).items():
            taken = partial(with_shards, handler=handler, ownership=ours)
            stack.enter_context(replaced(torch, name, taken))
        for name, handler in _mixing(METHODS, hook_context, dict.fromkeys(_ADDITIONS, handlers.add)).items():
            method = with_plain(getattr(torch.Tensor, name), handler, ours)
            stack.enter_context(replaced(DTensor, name, lambda _, method=method: method))  # type: ignore[misc]
        for name, handler in _methods(hook_context, cut_parts, take_shape).items():
            method = _handled(getattr(torch.Tensor, name), handler, ours)
            stack.enter_context(replaced(DTensor, name, lambda _, method=method: method))  # type: ignore[misc]
        reduce = by_all_or_rank0(handlers.reduce)
        for owner, name in _FUNCTIONS:
            stack.enter_context(replaced(owner, name, lambda function: _function(function, reduce, ours)))
        stack.enter_context(replaced(torch, "trace", lambda function: _function(function, _reading(), ours)))
        draw_like = by_all_or_rank0(partial(handlers.draw_like, hook_context.streams))
        for name in _LIKE:
            stack.enter_context(replaced(torch, name, lambda function: _handled(function, draw_like, ours)))
        get_data = _handled(data.__get__, shard_parts.counted_data, ours)
        for name in _CUTS:
            taken = partial(_function, handler=cut_parts, ownership=ours)
            stack.enter_context(replaced(torch, name, taken))
        shape = partial(_function, handler=take_shape, ownership=ours)
        for name in _SHAPES:
            stack.enter_context(replaced(torch, name, shape))
        stack.enter_context(replaced(torch, "eye", lambda function: _function(function, make_into, ours)))
        stack.enter_context(replaced(DTensor, "data", lambda _: property(get_data, set_data)))
        stack.enter_context(replaced(DTensor, "__deepcopy__", partial(_copied, ours)))
        stack.enter_context(replaced(DTensor, "full_tensor", partial(full_by_all_or_rank0, ours)))
        set_plain = _handled(data.__set__, handlers.full_data, ours)
        stack.enter_context(replaced(nn.Parameter, "data", lambda _: property(take_data, set_plain)))
        stack.enter_context(table.handling_operators(hook_context, updates))
        yield


def _methods(hook_context: HookContext, cut_parts: Handler, take_shape: Handler) -> dict[str, Handler]:
    """Return the handler of each method of a shard that needs one."""
    read = _reading()
    return {
        **dict.fromkeys(_READS, read),
        **dict.fromkeys(("numpy", "__array__"), read_only(read, hook_context)),
        **dict.fromkeys(("storage", "__dlpack__"), refuse_memory),
        **dict.fromkeys(_REDUCTIONS, shard_parts.fresh(by_all_or_rank0(handlers.reduce))),
        **dict.fromkeys(_NEW, partial(handlers.make_new, by_all_or_rank0(handlers.make_shard))),
        **dict.fromkeys(_DRAWS, partial(handlers.draw, hook_context.streams)),
        **dict.fromkeys(
            ("apply_", "map_", "map2_"), shard_writes.write_full
        ),  # torch would read what is no storage
        **dict.fromkeys(("view", *_SHAPES), take_shape),
        "detach": detached,
        **dict.fromkeys(_CUTS, cut_parts),
        "trace": read,  # its backward writes shards of a gradient into a plain tensor
        "__iter__": by_all_or_rank0(rows),
        "__getitem__": partial(_taken, read, cut_parts),
    }


def _reading() -> Handler:
    """Return the handler that computes with full tensors."""
    return shard_parts.fresh(by_all_or_rank0(handlers.gather))


def _mixing(names: Iterable[str], hook_context: HookContext, otherwise: dict[str, Handler]) -> dict[str, Handler]:
    """Return the handlers of methods or functions that compute a shard with plain tensors."""
    read = _reading()
    return compute_full(names, read, otherwise, hook_context.batches.may_have_rows)


def _taken(read: Handler, cut_parts: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    """Take elements of the full tensor where they are told by a tensor: `weight[weight > 0]`, `weight[labels]`."""
    _, index = args
    indices = index if isinstance(index, tuple) else (index,)
    by_tensor = any(isinstance(each, torch.Tensor) and each.dim() for each in indices)
    if by_tensor:
        return read(func, args, kwargs)
    rows = any(isinstance(each, int) for each in indices) and not knows_operator(torch.ops.aten.select.int)
    return cut_parts(func, args, {}) if rows else func(*args)


def _copied(ownership: Ownership, deepcopy: Any) -> Any:
    """Return a `__deepcopy__` by which rank 0 alone gets a plain copy: torch wants a shard's `clone` to be one."""
    return _handled(deepcopy, by_all_or_rank0(lambda func, args, kwargs: func(*args, **kwargs)), ownership)


def _handled(func: Any, handler: Handler, ownership: Ownership) -> Any:
    @wraps(func)
    def compute(*args: Any, **kwargs: Any) -> Any:
        return handler(func, args, kwargs) if ownership.ours else func(*args, **kwargs)

    return compute


def _function(func: Any, handler: Handler, ownership: Ownership) -> Any:
    @wraps(func)
    def compute(*args: Any, **kwargs: Any) -> Any:
        shards = ownership.ours and any(isinstance(value, DTensor) for value in (*args, *kwargs.values()))
        return handler(func, args, kwargs) if shards else func(*args, **kwargs)

    return compute
