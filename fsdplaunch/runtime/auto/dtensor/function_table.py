"""Give torch functions that a plain script calls with shards, outside the model, the handlers that compute them.

Needed because torch gives this rank's value without a word, gives a wrong one, or refuses. None of this is in a
model's own passes, where parameters are full: it is penalties, statistics, and updates written by hand.

The table is installed by name and not as `DTensor.__torch_function__`: torch would call that for every attribute
that FSDP2 and the optimizers read of a parameter too, some twelve times per parameter and step.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.auto.dtensor import mixtures, shard_parts, shard_writes
from fsdplaunch.runtime.auto.dtensor import shard_handlers as handlers
from fsdplaunch.runtime.auto.dtensor.full_mixtures import compute_full, with_plain
from fsdplaunch.runtime.auto.dtensor.optimizer_steps import stepping_without_handlers
from fsdplaunch.runtime.auto.dtensor.own_collectives import ALIKE, COLLECTIVES, refuse_collective
from fsdplaunch.runtime.auto.dtensor.reads import by_all_or_rank0, full_by_all_or_rank0
from fsdplaunch.runtime.auto.dtensor.row_loops import rows
from fsdplaunch.runtime.auto.dtensor.shared_memory import read_only, refuse_memory
from fsdplaunch.runtime.auto.dtensor.unknown_operators import UnknownOperators
from fsdplaunch.runtime.auto.dtensor.updates import WrappedUpdates, make_into
from fsdplaunch.runtime.auto.model.written_in_passes import take_data
from fsdplaunch.runtime.auto.patch import replaced
from fsdplaunch.runtime.auto.state.rank0.computed import Namer
from fsdplaunch.runtime.torch_internals.dtensor import (
    computing_unknown,
    finishing_results,
    knows_operator,
    operator_handlers,
)

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
_EXTREMES = ("max", "min", "amax", "amin")
_REDUCTIONS = ("sum", "mean", "norm", "std", "var", *_EXTREMES, "prod", "any", "all")
_ADDITIONS = ("__add__", "__radd__", "__sub__", "__rsub__")
_DRAWS = ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_", "geometric_")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new")
_LIKE = ("randn_like", "rand_like", "randint_like", "bernoulli", "normal")
_FUNCTIONS = (
    *((torch, name) for name in ("sum", "mean", "norm", *_EXTREMES)),
    *((torch.linalg, name) for name in ("norm", "vector_norm", "matrix_norm")),
)
"""What penalties are written with; in `loss += torch.norm(weight)` it is too late to gather when it is added."""
_SHAPES = ("reshape", "flatten", "ravel")
_OF_FULL = ("unbind", *(() if knows_operator(torch.ops.aten.select.int) else ("select",)))
"""Parts of which torch knows no gradient where a shard is cut; 2.7 takes no row of any."""
_LOSS_OPERATORS = (
    *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
_MIXING = ("add", "sub", "mul", "div", "lerp", "masked_fill")
"""How `average * decay + parameter * (1 - decay)` is computed, where the average is no shard."""
_AVERAGING = (*(f"{name}_" for name in _MIXING), "copy_", "addcmul_", "addcdiv_")
"""How it is updated in place."""
_UPDATING = (*_AVERAGING, *(f"_foreach_{name}" for name in _AVERAGING))
"""The same, and `torch._foreach_lerp_` and the like, which do so for many."""
_EXTREME_OPERATORS = (*_EXTREMES, "aminmax", "linalg_vector_norm")


@contextmanager
def handling_shards(hook_context: HookContext) -> Iterator[None]:
    """Install the handlers; they compute where the launcher shards for the script."""
    ours = hook_context.ownership
    data: Any = torch.Tensor.data
    set_data = _handled(data.__set__, partial(handlers.assign_data, hook_context.models), ours)
    with ExitStack() as stack:
        updates = WrappedUpdates(ours, stack)
        for name, handler in _mixing_methods(hook_context).items():
            method = with_plain(getattr(torch.Tensor, name), handler, ours)
            stack.enter_context(replaced(DTensor, name, lambda _, method=method: method))  # type: ignore[misc]
        for name, handler in _methods(hook_context).items():
            method = _handled(getattr(torch.Tensor, name), handler, ours)
            stack.enter_context(replaced(DTensor, name, lambda _, method=method: method))  # type: ignore[misc]
        reduce = by_all_or_rank0(handlers.reduce)
        for owner, name in _FUNCTIONS:
            stack.enter_context(replaced(owner, name, lambda function: _function(function, reduce, ours)))
        draw_like = partial(handlers.draw_like, hook_context.streams)
        for name in _LIKE:
            stack.enter_context(replaced(torch, name, lambda function: _handled(function, draw_like, ours)))
        get_data = _handled(data.__get__, shard_parts.counted_data, ours)
        for name in _OF_FULL:
            taken = partial(_function, handler=shard_parts.taken_of_full, ownership=ours)
            stack.enter_context(replaced(torch, name, taken))
        shape = partial(_function, handler=handlers.take_shape, ownership=ours)
        for name in _SHAPES:
            stack.enter_context(replaced(torch, name, shape))
        stack.enter_context(replaced(torch, "eye", lambda function: _function(function, make_into, ours)))
        stack.enter_context(replaced(DTensor, "data", lambda _: property(get_data, set_data)))
        stack.enter_context(replaced(DTensor, "full_tensor", partial(full_by_all_or_rank0, ours)))
        set_plain = _handled(data.__set__, handlers.full_data, ours)
        stack.enter_context(replaced(nn.Parameter, "data", lambda _: property(take_data, set_plain)))
        stack.enter_context(_handling_operators(hook_context, updates))
        yield


def _methods(hook_context: HookContext) -> dict[str, Handler]:
    """Return the handler of each method of a shard that needs one."""
    read = shard_parts.fresh(by_all_or_rank0(handlers.gather))
    return {
        **dict.fromkeys(_READS, read),
        **dict.fromkeys(("numpy", "__array__"), read_only(read, hook_context)),
        **dict.fromkeys(("storage", "__dlpack__"), refuse_memory),
        **dict.fromkeys(_REDUCTIONS, shard_parts.fresh(by_all_or_rank0(handlers.reduce))),
        **dict.fromkeys(_NEW, handlers.make_new),
        **dict.fromkeys(_DRAWS, partial(handlers.draw, hook_context.streams)),
        **dict.fromkeys(
            ("apply_", "map_", "map2_"), shard_writes.write_full
        ),  # torch would read what is no storage
        **dict.fromkeys(("view", *_SHAPES), handlers.take_shape),
        **dict.fromkeys(_OF_FULL, shard_parts.taken_of_full),
        "__iter__": by_all_or_rank0(rows),
        "__getitem__": partial(_taken, read),
    }


def _mixing_methods(hook_context: HookContext) -> dict[str, Handler]:
    """Return the handlers of methods that compute a shard with plain tensors."""
    read = shard_parts.fresh(by_all_or_rank0(handlers.gather))
    return compute_full(read, dict.fromkeys(_ADDITIONS, handlers.add), hook_context.batches.may_have_rows)


def _taken(read: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    """Take elements of the full tensor where they are told by a tensor: `weight[weight > 0]`, `weight[labels]`."""
    _, index = args
    indices = index if isinstance(index, tuple) else (index,)
    by_tensor = any(isinstance(each, torch.Tensor) and each.dim() for each in indices)
    if by_tensor:
        return read(func, args, kwargs)
    rows = any(isinstance(each, int) for each in indices) and not knows_operator(torch.ops.aten.select.int)
    return shard_parts.taken_of_full(func, args, {}) if rows else func(*args)


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


@contextmanager
def _handling_operators(hook_context: HookContext, updates: WrappedUpdates) -> Iterator[None]:
    """Install the handlers of operators, which backward passes and torch's own functions run as well."""
    ownership, table = hook_context.ownership, operator_handlers()
    kept = dict(table)

    def put(handlers_of: dict[Any, Handler]) -> None:
        table.update({op: _operator(handler, ownership, kept.get(op)) for op, handler in handlers_of.items()})

    operators = _operators(ownership)
    mixing, namer = _overloads(_MIXING), Namer(hook_context)
    put({op: namer.naming(each) if op in mixing else each for op, each in operators.items()})
    table.update(dict.fromkeys(_overloads(COLLECTIVES, torch.ops.c10d), refuse_collective))
    for name, exchange in ALIKE.items():
        put(dict.fromkeys(_overloads([name], torch.ops.c10d), exchange))
    writes = PartWrites(put, operators)
    shard_parts.begin_with(writes.begin)
    views = shard_writes.view_operators()
    put(dict.fromkeys(views, partial(shard_parts.take_part, writes.begin)))
    unknown = UnknownOperators(ownership, hook_context.streams, put, writes.begin)
    many = (*views, *shard_writes.writing_operators(), *shard_writes.filling_operators())
    try:
        with (
            computing_unknown(unknown.meet),
            finishing_results(lambda result: handlers.finish(result) if ownership.ours else result),
            stepping_without_handlers([*_overloads((*_MIXING, *_UPDATING)), *many], updates.wrap),
        ):
            yield
    finally:
        table.clear()
        table.update(kept)


def _operators(ownership: Ownership) -> dict[Any, Handler]:
    """Return the handler of each operator that needs one from the beginning."""
    read = by_all_or_rank0(handlers.gather)
    losses = [name + end for name in _LOSS_OPERATORS for end in ("", "_backward")]
    found: dict[Any, Handler] = {}
    for names, handler in (
        ((*losses, "std", "argmax", "argmin"), handlers.replicate),
        (_EXTREME_OPERATORS, handlers.replicate_empty),
        (("mean",), handlers.replicate_unequal),
        (_MIXING, mixtures.combine_mixed(read, ownership)),
        (_UPDATING, mixtures.update_mixed(read)),
        (("_foreach_copy_",), mixtures.copy_each),
        (shard_writes.FULL_WRITES, shard_writes.write_full),
    ):
        found |= dict.fromkeys(_overloads(names), handler)
    found |= dict.fromkeys(shard_writes.filling_operators(), shard_writes.fill_out)
    found[torch.ops.aten.fill_.Tensor] = handlers.fill_with
    fill = torch.ops.aten.masked_fill_.Scalar
    return found if knows_operator(fill) else {**found, fill: handlers.fill}


class PartWrites:
    """The operators that write, which from the first part of a shard on are looked at for what they write into.

    Not before: an optimizer of a script's own calls several of them for each parameter and step.

    Args:
        put: Puts handlers into DTensor's table.
        operators: Those that have one from the beginning.
    """

    def __init__(self, put: Callable[[dict[Any, Handler]], None], operators: dict[Any, Handler]) -> None:
        self._put, self._operators, self._begun = put, operators, False

    def begin(self) -> None:
        """Look at them from now on."""
        if self._begun:
            return
        self._begun = True
        known = dict.fromkeys(shard_writes.writing_operators(), shard_writes.update_placed)
        own = {op: handler for op, handler in self._operators.items() if shard_writes.is_writing(op)}
        self._put({op: shard_writes.seen_writing(handler) for op, handler in (known | own).items()})


def _overloads(names: Iterable[str], library: Any = torch.ops.aten) -> list[Any]:
    packets = [getattr(library, name) for name in names if hasattr(library, name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def _operator(handler: Handler, ownership: Ownership, torchs: Any) -> Any:
    def compute(op: Any, args: Any, kwargs: Any) -> Any:
        table = operator_handlers()  # another one while an optimizer steps
        own = table.pop(op)  # torch's own way inside
        if torchs is not None:
            table[op] = torchs
        try:
            return handler(op, args, kwargs) if ownership.ours else shard_parts.compute_plainly(op, args, kwargs)
        finally:
            table[op] = own

    return compute
