"""Divide the passes of one sharded model by rows, so that a script over ranks computes what one process does.

With the global batch kept every rank runs the script on the global batch, with the same random numbers. Only the
sharded model's pass is divided: what it is given is cut to the rank's rows on entry, and what it returns is
gathered, differentiably, on exit. The division is verified, not assumed: the first pass of each kind is also
computed whole, and where the divided one does not agree every rank computes all rows from then on.
"""

import copy
import io
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto import digest
from fsdplaunch.runtime.auto.batch.in_pass import (
    Draws,
    GlobalBatchNorm,
    GlobalDraws,
    UndividedError,
    recording_draws,
)
from fsdplaunch.runtime.auto.batch.rank_rows import (
    Form,
    Held,
    Joined,
    RankRows,
    Returned,
    Same,
    Weights,
    are_close,
    form_of,
    losses_in,
    measured,
    weights_of,
)
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.random_numbers import random_states, set_random_states
from fsdplaunch.runtime.rank import DataRanks
from fsdplaunch.runtime.torch_internals.distributed import local_tensor
from fsdplaunch.runtime.torch_internals.fsdp import abandon_pass, forget_order, root_mixed_precision
from fsdplaunch.runtime.torch_internals.modules import BatchNorm, forward_hooks
from fsdplaunch.runtime.torch_internals.tensors import (
    change_count,
    is_in_transform,
    recomputes_later,
    tensors_held,
    tree_flatten,
    tree_unflatten,
)

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format, type(None))


@dataclass(slots=True)
class Kind:
    """Passes that are divided alike: of one module, in one mode, given tensors with rows in the same places."""

    draws: Draws = field(default_factory=Draws)
    returned: list[Returned] | None = None  # how ranks' parts of each output are one; None before it was measured
    whole: str = ""  # why every rank computes all rows
    passes: int = 0

    def losses(self) -> list[Joined]:
        """Return what of the outputs is joined by a rule."""
        return list(losses_in(self.returned or ()))

    def is_ambiguous(self, weights: Weights) -> bool:
        """Return whether the ways that are left to join the ranks' outputs differ for this batch."""
        return any(not each.is_clear(weights) for each in self.losses())

    def is_due(self) -> bool:
        """Return whether the pass that begins is to be computed whole, too.

        The first; of a loss, whose rule may have fitted by chance, the next as well; and others, ever more seldom.
        """
        again = bool(self.losses()) and self.passes <= _MEASURED
        return self.returned is None or again or _is_looked_at(self.passes)


_MEASURED = 3  # passes of a kind that returns its loss that are measured, at the least


def _is_looked_at(passes: int) -> bool:
    """Return whether to look at a pass, counted from 1: the first, 4th, 16th, 64th, ..."""
    return passes & (passes - 1) == 0 and passes.bit_length() % 2 == 1


class DividedPasses:
    """The passes of one sharded model on one rank of those that read different data."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        data: DataRanks,
        group: dist.ProcessGroup | None,
        rates: Callable[[], list[float]],
    ) -> None:
        self.model = weakref.ref(model)
        self.name = name
        self.data, self.group, self.rates = data, group, rates
        self.kinds: dict[Any, Kind] = {}
        self.hooks = [forward_hooks(module) for module in model.modules()]
        self.measuring = False
        self.trying: tuple[Kind, RankRows] | None = None
        self.now: _Now | None = None
        self.redraw: GlobalDraws | None = None

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin a pass; return what this rank computes it with. Collective where the kind is measured."""
        self.now = None
        if self.trying is not None:
            return self._cut(*self.trying, args, kwargs)
        divided = None if self.measuring or is_in_transform() else self._divided(module, args, kwargs)
        if divided is None:
            return args, kwargs
        kind, rows, weights = divided
        if not _announced:
            _announced.append(rows.total)
            messages.say(f"{rows.total} rows are divided over {rows.ranks} ranks in the passes of {self.name}")
        return self._cut(kind, rows, args, kwargs, weights)

    def _divided(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Kind, RankRows, Weights] | None:
        """Return how a pass is divided; None where every rank computes all rows. Collective where measured."""
        leaves, _ = tree_flatten((args, kwargs))
        total = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
        if total < self.data.size or total % self.data.size:
            if total:
                self._warn_whole(f"{total} rows cannot be divided over {self.data.size} ranks")
            return None
        kind = self.kinds.setdefault(self._key(module, leaves, total), Kind())
        rows = RankRows(total, self.data.rank, self.data.size, self.group)
        kind.passes += 1
        if _is_looked_at(kind.passes):
            self._check_same(leaves)
        if not kind.whole and recomputes_later(trains=torch.is_grad_enabled()):
            # What a checkpoint around the whole pass computes again is given all rows, in a backward pass.
            kind.whole = "the script checkpoints the whole pass, not blocks of the model"
            self._warn_whole(kind.whole)
        if kind.whole:
            return None
        # Counting what labels count waits for a GPU: where no loss is joined there is no need of it.
        weights = weights_of(leaves, rows) if kind.is_due() or kind.losses() else {}
        if kind.is_due() or kind.is_ambiguous(weights):
            self._measure(module, kind, rows, args, kwargs, weights)
        # A mean over the rows of a rank of which none counts is not a number.
        counts_nothing = any(0.0 in each.weights(weights) for each in kind.losses())
        whole = kind.whole or kind.is_ambiguous(weights) or counts_nothing
        return None if whole else (kind, rows, weights)

    def end(self, output: Any) -> Any:
        """End a pass; return what one process would, and None after an error. Collective."""
        now, self.now = self.now, None
        if now is None:
            return output
        now.leave()
        if output is None:
            return None
        if now.drawing is not None and now.drawing.recomputed:
            self.redraw = now.drawing
        if self.trying is not None:
            return output
        leaves, spec = tree_flatten(output)
        pairs, late = zip(now.kind.returned or (), leaves, strict=True), bool(now.kind.losses())
        return tree_unflatten([each.join(leaf, now.rows, now.weights, late) for each, leaf in pairs], spec)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Draw in a backward pass that computes parts of the pass again as they were drawn in it."""
        again, self.redraw = self.redraw, None
        with nullcontext() if again is None else GlobalDraws(again.rows, again.draws, again=again):
            yield

    def _cut(
        self, kind: Kind, rows: RankRows, args: Any, kwargs: Any, weights: Weights | None = None
    ) -> tuple[Any, Any]:
        def own(leaf: Any) -> Any:
            """Return a rank's rows of what has them, and anything else with the gradients of all ranks."""
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return rows.cut(leaf) if leaf.dim() and leaf.shape[0] == rows.total else rows.share(leaf)

        leaves, spec = tree_flatten((args, kwargs))
        cut = list(map(own, leaves))
        model: Any = self.model()
        norms = (each for each in model.modules() if isinstance(each, BatchNorm))
        entered, drawing = ExitStack(), None
        if kind.draws.shapes:
            drawing = GlobalDraws(rows, kind.draws, learning=self.trying is not None)
            entered.enter_context(drawing)
        if any(each.training or each.running_mean is None for each in norms):
            entered.enter_context(GlobalBatchNorm(rows))
        self.now = _Now(kind, rows, weights or {}, drawing, entered.close)
        args, kwargs = tree_unflatten(cut, spec)
        return args, kwargs

    def _key(self, module: nn.Module, leaves: list[Any], total: int) -> Any:
        """Return what is equal for passes that are divided alike."""

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return type(leaf)
            return leaf.dtype, leaf.requires_grad, tuple(size == total for size in leaf.shape)

        modes_ = (module.training, torch.is_grad_enabled(), torch.is_autocast_enabled(), sum(map(len, self.hooks)))
        return id(module), modes_, tuple(map(place, leaves))

    def _check_same(self, leaves: list[Any]) -> None:
        """Check that all ranks give a pass the same, and train by the same learning rates. Collective."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and type(leaf) is torch.Tensor]
        own = [(tuple(leaf.shape), digest(leaf)) for leaf in tensors]
        facts = from_all((own, self.rates()), self.group)
        other = next((rank for rank, fact in enumerate(facts) if fact != facts[0]), None)
        if other is None:
            return
        if facts[other][0] == facts[0][0]:
            rates = f"{facts[0][1]} on rank 0 and {facts[other][1]} on rank {other}"
            msg = f"{script_line()}: ranks step with different learning rates: {rates}"
            raise ShardingError(msg, hint="change them by values that all ranks share, not by a rank's number")
        msg = f"{script_line()}: {self.name} gets different values on rank {other} than on rank 0"
        hint = (
            "with keep_global_batch all ranks must compute the same values outside the model: seed what splits,"
            " shuffles or draws the data (torch.manual_seed, numpy's default_rng(0), random.Random(0))"
        )
        raise ShardingError(msg, hint=hint)

    def _measure(
        self, module: nn.Module, kind: Kind, rows: RankRows, args: Any, kwargs: Any, weights: Weights
    ) -> None:
        """Compute a pass whole and divided, without gradients, and note how the outputs of ranks are joined."""
        model: Any = self.model()
        self.measuring = True
        try:
            leaves, _ = tree_flatten((args, kwargs))
            if any(not isinstance(each, (torch.Tensor, *_PLAIN)) and any(tensors_held(each)) for each in leaves):
                _compute_whole("its inputs hold tensors inside objects")
            hooks = [str(getattr(each, "__module__", "")) for held in self.hooks[1:] for each in held.values()]
            if not all(each.startswith(("torch.", "fsdplaunch.")) for each in hooks):
                _compute_whole("hooks of the script see what is computed inside")
            outputs = self._both(module, kind, rows, args, kwargs)
            found = [measured(*each, rows, weights, _tolerance(model)) for each in outputs]
            forget_order(model)
            kind.returned = _still(kind.returned, found)
        except _WholeError as reason:
            kind.whole = str(reason)
            self._warn_whole(kind.whole)
        finally:
            self.measuring, self.trying = False, None

    def _both(
        self, module: nn.Module, kind: Kind, rows: RankRows, args: Any, kwargs: Any
    ) -> Iterable[tuple[Form, Any, Any]]:
        """Return each output of a whole and of a divided pass, with how they differ in shape. Collective."""
        model: Any = self.model()
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        counts = list(map(change_count, tensors))
        undo = _Undo(model)
        with recording_draws(kind.draws):
            whole = _try(module, args, kwargs)
        left = _left_behind(model)
        undo()
        if isinstance(whole, Exception):
            abandon_pass(model)
            _compute_whole("it computes gradients inside its pass")
        if counts != list(map(change_count, tensors)) or undo.parameters_changed:
            _compute_whole("it changes parameters, or what it is given")
        self.trying = kind, rows
        part = _try(module, args, kwargs)
        self.trying = None
        left_divided = _left_behind(model)
        undo()
        (wholes, spec), (parts, spec_of_parts) = tree_flatten(whole), tree_flatten(part)
        forms: list[Form] = []
        reason, other_form = "", "with fewer rows its outputs have an unexpected structure or shape"
        if isinstance(part, Exception):
            reason = f"it fails when given only part of the rows ({type(part).__name__}: {part})"
        elif not _agree(left, left_divided, _tolerance(model)):
            reason = "it stores something computed from its rows"
        else:
            forms = [form_of(one, other, rows) for one, other in zip(wholes, parts, strict=False)]
            if spec != spec_of_parts or None in forms:
                reason = other_form
        every = from_all((reason, forms), self.group)
        reasons = [each for each, _ in every if each]
        if any(each != forms for _, each in every):  # of different shapes on each rank
            reasons.append(other_form)
        if reasons:
            abandon_pass(model)
            raise _WholeError(reasons[0])
        return zip(forms, wholes, parts, strict=True)

    def _warn_whole(self, why: str) -> None:
        key = f"{self.name}: {why}"
        if key not in _warned:
            _warned.add(key)
            messages.say(f"{script_line()}: every rank computes all rows of {self.name}: {why}")


class _WholeError(Exception):
    """Why every rank computes all rows."""


def _compute_whole(reason: str) -> NoReturn:
    raise _WholeError(reason)


_warned: set[str] = set()
_announced: list[int] = []  # the rows of the first divided pass, once it was announced


@dataclass(slots=True)
class _Now:
    """The divided pass that runs."""

    kind: Kind
    rows: RankRows
    weights: Weights
    drawing: GlobalDraws | None
    leave: Callable[[], None]


def _try(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what a module returns without gradients, or the error that it raises, with nothing printed."""
    try:
        with torch.no_grad(), redirect_stdout(io.StringIO()):
            return module(*args, **kwargs)
    except (UndividedError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return error


def _still(before: list[Returned] | None, found: list[Returned | None]) -> list[Returned]:
    """Return how outputs are joined by what was measured so far and now."""
    returned = [each for each in found if each is not None]
    if len(returned) < len(found):
        _compute_whole("its rows depend on each other")
    for known, now in zip(before or (), returned, strict=False):
        if isinstance(known, Joined) and isinstance(now, Joined):
            known.rules = [rule for rule in known.rules if rule in now.rules]
            fits = bool(known.rules)
        elif isinstance(known, Held) and isinstance(now, Held):
            fits = bool(_still(known.inside, [*now.inside])) or not known.inside
        else:  # a loss of 0 is the same by every rule
            fits = known == now or (isinstance(known, Joined) and isinstance(now, Same))
        if not fits:
            _compute_whole("what it returns is not a sum or mean over rows")
    return before or returned


def _tolerance(model: Any) -> float:
    """Return how far outputs of the same rows may differ: products of fewer rows are rounded otherwise."""
    dtype = root_mixed_precision(model).param_dtype if isinstance(model, FSDPModule) else None
    low = dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled()
    low = low or any(param.dtype in (torch.float16, torch.bfloat16) for param in model.parameters())
    return 3e-2 if low else 1e-4


class _Undo:
    """Puts back what a pass changes: random numbers, parameters, buffers, and what modules keep."""

    def __init__(self, model: nn.Module) -> None:
        self.states = random_states()
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        shards = [param for param in model.parameters() if isinstance(param, DTensor)]
        self.shards = [(param, local_tensor(param).detach().clone()) for param in shards]
        self.kept = []
        for module in model.modules():
            kept = dict(vars(module))
            held = [value for name, value in kept.items() if name not in ("_parameters", "_modules")]  # torch's
            contents = [(each, copy.copy(each)) for each in held if type(each) in (list, dict, set, deque)]
            self.kept.append((module, kept, contents))
        self.parameters_changed = False

    @torch.no_grad()
    def __call__(self) -> None:
        set_random_states(self.states)
        locals_ = [(local_tensor(param), value) for param, value in self.shards]
        changed = [(local, value) for local, value in locals_ if not torch.equal(local, value)]
        self.parameters_changed = bool(changed)
        for tensor, value in (*self.buffers, *changed):
            tensor.copy_(value)
        for module, before, contents in self.kept:
            for name in [name for name in vars(module) if name not in before]:
                del vars(module)[name]
            vars(module).update(before)
            for held, content in contents:
                held.clear()
                held.extend(content) if isinstance(held, list | deque) else held.update(content)


def _left_behind(model: nn.Module) -> list[torch.Tensor]:
    """Return what a pass has left in a model beside parameters: buffers, and tensors that modules keep."""
    found = [buffer.detach().clone() for buffer in model.buffers()]
    for module in model.modules():
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            held = value if isinstance(value, list | tuple) else (value,)
            found += [each.detach() for each in held if isinstance(each, torch.Tensor)]
    return found


def _agree(one: list[torch.Tensor], other: list[torch.Tensor], tolerance: float) -> bool:
    if [each.shape for each in one] != [each.shape for each in other]:
        return False
    pairs = zip(one, other, strict=True)
    return all(are_close(a, b, tolerance, tolerance) for a, b in pairs if not a.is_complex())
