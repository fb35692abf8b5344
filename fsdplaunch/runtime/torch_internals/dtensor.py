"""What torch's DTensor keeps to itself: the local shard, and the tables its operators are dispatched by."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

local_tensor: Callable[[Any], torch.Tensor] = operator.attrgetter("_local_tensor")
"""Return a DTensor's shard, the very object, which `to_local` may wrap; all versions."""
placements_of: Callable[[Any], Any] = operator.attrgetter("_spec.placements")
"""Return how a DTensor is placed, in a third of the time that its property takes; all versions."""


def with_local_tensor(tensor: Any, local: torch.Tensor) -> Any:
    """Return a DTensor like another over a shard on any device, which `from_local` would move; all versions."""
    return type(tensor)(local, tensor._spec, requires_grad=False)


def detached_view(tensor: Any) -> Any:
    """Return a view of a DTensor without its gradient, over the same shard; None for what is none; all versions.

    Where what it is a view of was changed, torch looks for the view's gradient anew, and ends in an assertion.
    """
    if not tensor.requires_grad or not tensor._is_view() or torch.compiler.is_compiling():
        return None
    return with_local_tensor(tensor, tensor._local_tensor.detach())


def shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a DTensor's shard and where in the full tensor it begins; all versions."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def silence_slow_exchanges() -> None:
    """Keep torch from logging that a tensor of two axes is gathered in two exchanges; from 2.12 on it does."""
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
        lambda record: "While redistributing from" not in record.getMessage()
    )


def operator_handlers() -> dict[Any, Any]:
    """Return DTensor's table of operators with handlers of their own; all versions, else empty, without effect."""
    handlers: dict[Any, Any] = getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})
    return handlers


def use_operator_handlers(handlers: dict[Any, Any]) -> None:
    """Have DTensor look up handlers in this table; all versions, which read the attribute at every operator."""
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._custom_op_handlers = handlers


def unscale_operator() -> Any:
    """Return the operator by which `GradScaler` unscales gradients and looks for overflows; all versions."""
    return torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def known_operators() -> list[Any]:
    """Return the operators that DTensor computes; all versions, in two or three tables."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    return list(dict.fromkeys(op for table in tables for op in getattr(propagator, table, ())))


def gives_view(operator: Any) -> bool:
    """Return whether an operator's schema says that it gives views of what it is given; all versions."""
    returned = operator._schema.returns
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returned)


def filled_arguments(operator: Any) -> list[str]:
    """Return the names of an operator's `out=` arguments; all versions."""
    return [each.name for each in operator._schema.arguments if each.is_out]


def knows_operator(operator: Any) -> bool:
    """Return whether DTensor computes an operator by itself.

    2.7 and 2.9 have one table, from 2.11 on there are two.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_strategy_funcs", "op_single_dim_strategy_funcs")
    return any(operator in getattr(propagator, table, ()) for table in tables)


def written_arguments(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return what an operator writes into of what it is given, by its schema; all versions."""
    arguments = operator._schema.arguments
    written = [each.alias_info is not None and each.alias_info.is_write for each in arguments]
    by_name = {each.name for each, writes in zip(arguments, written, strict=True) if writes}
    return [each for each, writes in zip(args, written, strict=False) if writes] + [
        value for name, value in kwargs.items() if name in by_name
    ]


def writes(operator: Any) -> bool:
    """Return whether an operator's schema says that it writes into what it is given; all versions."""
    given = operator._schema.arguments
    return any(each.alias_info is not None and each.alias_info.is_write for each in given)


def changes_shape_of_given(operator: Any) -> bool:
    """Return whether an operator gives what it is given another shape or memory: `t_`, `set_`; all versions."""
    return torch.Tag.inplace_view in operator.tags


def is_random(operator: Any) -> bool:
    """Return whether an operator draws; all versions."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def is_elementwise(operator: Any) -> bool:
    """Return whether an operator computes each element by itself, as torch has tagged it; all versions.

    Not all versions tag what writes in place and what is for lists: then as what is named so without.
    """
    if torch.Tag.pointwise in operator.tags:
        return True
    name, _, overload = str(operator).removeprefix("aten.").partition(".")
    for_lists = name.startswith("_foreach_")
    packet = getattr(torch.ops.aten, name.removeprefix("_foreach_").removesuffix("_"), None)
    if packet is None or (not for_lists and not hasattr(packet, overload)):
        return False
    overloads = [each for each in packet.overloads() if "out" not in each] if for_lists else [overload]
    return all(torch.Tag.pointwise in getattr(packet, each).tags for each in overloads)


def decomposed(operator: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operator by those that it is made of; `NotImplemented` where it is made of none; all versions."""
    made_of = torch._C.DispatchKey.CompositeImplicitAutograd
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), made_of):
        return NotImplemented
    return operator.decompose(*args, **kwargs)


_MIXED = "got mixed torch.Tensor and DTensor"
_MOVED = "in-place operations that require placement changes"


def refuse_mixture(operator: Any) -> None:
    """Say what torch says of plain tensors and DTensors together.

    Raises:
        RuntimeError: Always.
    """
    msg = f"{operator}: {_MIXED}, need to convert all torch.Tensor to DTensor"
    raise RuntimeError(msg)


@contextmanager
def computing_unknown(
    begin: Callable[[Any, Any, Any], Any], compute: Callable[[Any, Any, Any], Any]
) -> Iterator[None]:
    """Let `compute` have the operators that DTensor has no rule for; all versions.

    Newer versions compute some of these by others. `begin` has an operator before torch, until it has a handler.

    Where `begin` returns `NotImplemented` torch tries; where `compute` does, torch's error is raised. No frame is
    left with that error: it would hold the frame in turn, with what is returned, and 2.7's garbage collector then
    empties what a graph has saved of it.
    """
    dispatcher: Any = DTensor._op_dispatcher
    name = "dispatch" if hasattr(dispatcher, "dispatch") else "_propagate_op_sharding_dispatch_slow_path"
    torchs = getattr(dispatcher, name, None)
    if torchs is None:
        yield
        return

    def dispatch(operator: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        if operator in operator_handlers():
            return torchs(operator, args, kwargs, *rest)
        begun = begin(operator, args, kwargs)
        if begun is not NotImplemented:
            return begun
        try:
            return torchs(operator, args, kwargs, *rest)
        except (NotImplementedError, RuntimeError, AssertionError) as error:
            if operator in known_operators() and _MOVED not in str(error):
                raise
            refused = error
        try:
            result = compute(operator, args, kwargs)
            if result is NotImplemented:
                raise refused
            return result
        finally:
            del refused

    setattr(dispatcher, name, dispatch)
    try:
        yield
    finally:
        setattr(dispatcher, name, torchs)


@contextmanager
def finishing_results(finish: Callable[[Any], Any]) -> Iterator[None]:
    """Let `finish` have what each operation on DTensors gives, under 2.7 to 2.9; without effect from 2.11 on.

    There `x + 1` of a result that is still to be added up over the ranks is wrong, and in 2.7 its gradient is.
    """
    dispatcher: Any = DTensor._op_dispatcher
    dispatch: Any = getattr(dispatcher, "dispatch", None)
    if dispatch is None:  # it is written in C++
        yield
        return

    def dispatch_and_finish(operator: Any, *args: Any, **kwargs: Any) -> Any:
        result = dispatch(operator, *args, **kwargs)
        return result if operator is torch.ops.aten.detach.default else finish(result)  # `finish` detaches

    dispatcher.dispatch = dispatch_and_finish
    try:
        yield
    finally:
        dispatcher.dispatch = dispatch
