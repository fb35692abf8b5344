"""Give torch's operators that run with shards the handlers that compute them.

Backward passes and torch's own functions run these operators as well as a script does.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.auto.dtensor import mixtures, shard_parts, shard_writes
from fsdplaunch.runtime.auto.dtensor import shard_handlers as handlers
from fsdplaunch.runtime.auto.dtensor.own_collectives import ALIKE, COLLECTIVES, FUNCTIONAL, refusing
from fsdplaunch.runtime.auto.dtensor.reads import by_all_or_rank0, operator_by_all_or_rank0
from fsdplaunch.runtime.auto.dtensor.unknown_operators import UnknownOperators, by_torch
from fsdplaunch.runtime.auto.dtensor.updates import WrappedUpdates
from fsdplaunch.runtime.auto.optimizers.optimizer_steps import stepping_without_handlers
from fsdplaunch.runtime.auto.state.rank0.computed import Namer
from fsdplaunch.runtime.auto.state.rank0.writes_after_steps import WritesAfterSteps
from fsdplaunch.runtime.torch_internals.dtensor import (
    computing_unknown,
    finishing_results,
    knows_operator,
    operator_handlers,
)
from fsdplaunch.runtime.torch_internals.operators import FUNCTIONAL_COLLECTIVES

Handler = handlers.Handler

_LOSS_OPERATORS = (
    *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
_CONVOLUTIONS = ("convolution", "convolution_backward")
"""Of shards torch computes each rank's own part, as if images were divided: LoRA merged into weights."""
_MIXING = ("add", "sub", "mul", "div", "lerp", "masked_fill")
"""How `average * decay + parameter * (1 - decay)` is computed, where the average is no shard."""
_COMBINING = (*_MIXING, "rsub", "dist")
"""The same, and what penalties compare a parameter, or a product of it, with a plain tensor by."""
_AVERAGING = (*(f"{name}_" for name in _MIXING), "copy_", "addcmul_", "addcdiv_")
"""How it is updated in place."""
_UPDATING = (*_AVERAGING, *(f"_foreach_{name}" for name in _AVERAGING))
"""The same, and `torch._foreach_lerp_` and the like, which do so for many."""
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot")
"""Of parameters with each other, as an orthogonality penalty has them; scripts write into what they give."""
EXTREMES = ("max", "min", "amax", "amin")
_EXTREME_OPERATORS = (*EXTREMES, "aminmax", "linalg_vector_norm")


class OperatorTable:
    """The handlers in DTensor's table of operators.

    Args:
        ownership: Says whether the launcher shards for the script: they compute only then.
        writes: Lets this rank wait where it writes into parameters.
    """

    def __init__(self, ownership: Ownership, writes: WritesAfterSteps) -> None:
        self.ownership = ownership
        self._writes = writes
        self._own = _operators(ownership)
        self._table = operator_handlers()
        self._kept = dict(self._table)
        self._handled: set[Any] = set()
        self._asking: set[Any] = set()
        self._sees_writes = False

    @contextmanager
    def handling_operators(self, hook_context: HookContext, updates: WrappedUpdates) -> Iterator[None]:
        """Install the handlers."""
        mixing, namer = _overloads(_MIXING), Namer(hook_context)
        self._put({op: namer.naming(each) if op in mixing else each for op, each in self._own.items()})
        functional = _overloads(FUNCTIONAL, FUNCTIONAL_COLLECTIVES)
        exchanging = (*_overloads(COLLECTIVES, torch.ops.c10d), *functional)
        self._table.update(dict.fromkeys(exchanging, refusing(self.ownership)))
        for name, exchange in ALIKE.items():
            self._put(dict.fromkeys(_overloads([name], torch.ops.c10d), exchange))
        views = shard_writes.view_operators()
        self._put(dict.fromkeys(views, partial(shard_parts.take_part, self.see_writes)))
        unknown = UnknownOperators(self.ownership, hook_context.streams, self._put, self.see_writes)
        hook_context.when_sharded.append(self._ask_for_rank0)
        try:
            with (
                computing_unknown(unknown.begin, unknown.meet),
                finishing_results(lambda result: handlers.finish(result) if self.ownership.ours else result),
                stepping_without_handlers(self._asking, self.ownership, updates.wrap),
            ):
                yield
        finally:
            self._table.clear()
            self._table.update(self._kept)

    def _ask_for_rank0(self) -> None:
        """Have the operators that have no handler look whether rank 0 alone computes, from the first model on."""
        if not self._asking:
            asking = (*shard_writes.computing_operators(), *shard_writes.writing_operators())
            self._asking.update(op for op in asking if op not in self._handled)
            self._put(dict.fromkeys(self._asking, by_torch))

    def see_writes(self) -> None:
        """Look from now on at the operators that write for what they write into: there are parts of shards.

        Not before: an optimizer of a script's own calls several of them for each parameter and step.
        """
        if self._sees_writes:
            return
        self._sees_writes = True
        known = dict.fromkeys(shard_writes.writing_operators(), shard_writes.update_placed)
        own = {op: handler for op, handler in self._own.items() if shard_writes.is_writing(op)}
        self._put({op: shard_writes.seen_writing(handler) for op, handler in (known | own).items()})

    def _put(self, handlers_of: dict[Any, Handler]) -> None:
        self._handled |= handlers_of.keys()
        for op, each in handlers_of.items():
            handler = operator_by_all_or_rank0(each) if shard_writes.is_computing(op) else each
            if shard_writes.is_writing(op):
                handler = self._writes.waiting(handler)
            for table in (self._table, operator_handlers()):  # another one while an optimizer steps
                table[op] = _operator(handler, self.ownership, self._kept.get(op))


def _operators(ownership: Ownership) -> dict[Any, Handler]:
    """Return the handler of each operator that needs one from the beginning."""
    read = by_all_or_rank0(handlers.gather)
    losses = [name + end for name in _LOSS_OPERATORS for end in ("", "_backward")]
    found: dict[Any, Handler] = {}
    for names, handler in (
        ((*losses, "std", "argmax", "argmin", *_CONVOLUTIONS), handlers.replicate),
        (_EXTREME_OPERATORS, handlers.replicate_empty),
        (("mean",), handlers.replicate_unequal),
        (_PRODUCTS, handlers.add_up),
        (_COMBINING, mixtures.combine_mixed(read, ownership)),
        (_UPDATING, mixtures.update_mixed(read)),
        (("_foreach_copy_",), mixtures.copy_each),
        (shard_writes.FULL_WRITES, shard_writes.write_full),
    ):
        found |= dict.fromkeys(_overloads(names), handler)
    found |= dict.fromkeys(shard_writes.filling_operators(), shard_writes.fill_out)
    found[torch.ops.aten.fill_.Tensor] = handlers.fill_with
    fill = torch.ops.aten.masked_fill_.Scalar
    return found if knows_operator(fill) else {**found, fill: handlers.fill}


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
