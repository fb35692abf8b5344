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


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return a DTensor's shard, the very object, which `to_local` may wrap; all versions."""
    local: torch.Tensor = tensor._local_tensor
    return local


placements_of: Callable[[Any], Any] = operator.attrgetter("_spec.placements")
"""Return how a DTensor is placed, in a third of the time that its property takes; all versions."""


def with_local_tensor(tensor: Any, local: torch.Tensor) -> Any:
    """Return a DTensor like another over a shard on any device, which `from_local` would move; all versions."""
    return type(tensor)(local, tensor._spec, requires_grad=False)


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
