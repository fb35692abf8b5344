"""Passes that rank 0 makes alone (`if rank == 0: evaluate(model)`), and ways on which ranks part in one.

The other ranks wait in what all ranks do next and hand over their shards. Rank 0's modules have full parameters in
the pass, and torch's hooks gather nothing. Whether all ranks make a pass is looked at where ranks part: where a
model turns from training to evaluation and back, and where a line first computes without gradients. All ranks
gather a block at once, and average its gradients at once: where they call different ones, torch waits for ever.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as optimizers

from fsdplaunch.display_text import short_count
from fsdplaunch.errors import CheckpointError, ShardingError
from fsdplaunch.runtime.auto import HookContext
from fsdplaunch.runtime.auto.rank0.position import Place
from fsdplaunch.runtime.auto.rank0.service import check_all_ranks, open_once, service, sharded_parameters
from fsdplaunch.runtime.inspection import clean_name
from fsdplaunch.runtime.inspection.units import is_over_all_ranks, is_unit, original_class
from fsdplaunch.runtime.messages import calling_lines, script_line
from fsdplaunch.runtime.patch import before_first_step
from fsdplaunch.runtime.state_dict.gather import raise_failed
from fsdplaunch.runtime.torch_internals.fsdp import (
    before_reducing_gradients,
    cast_inputs,
    cast_output,
    is_in_flat_parameter,
    mixed_precision_of,
    names_without_gradient,
    param_groups,
    suspend_unit,
)
from fsdplaunch.runtime.torch_internals.modules import (
    computes_compiled,
    is_compiled,
    own_parameters,
    put_tensor,
    untraced,
)

_HINT = (
    "call the model on all ranks: take the evaluation out of `if rank == 0:`, give all ranks the same number of"
    " batches, and let rank 0 print; rank 0 alone can evaluate a model that FSDP2 shards and that is not compiled"
)
_OWN_DRAWS = (
    "call the model on all ranks: each rank draws its own random numbers once training has begun, and may branch"
    " differently on them; launch with --keep-global-batch, with which all ranks draw the same"
)


_running: list["Passes"] = []  # those that rank 0 alone is in


class Passes:
    """The passes of one model; those that rank 0 makes alone have full parameters, kept until the next step."""

    def __init__(self, model: nn.Module, name: str, hook_context: HookContext) -> None:
        _passes[model] = self
        self.name, self._hook_context = name, hook_context
        self._evaluated_at = -1
        self._training = True
        self._without_gradients: set[str] = set()
        self._eager = False
        self._full: dict[int, torch.Tensor] = {}
        self._fetched_at: Place | None = None
        self._undo: list[Callable[[], Any]] = []

    def begin(self, model: nn.Module) -> "Passes | None":
        """Begin a pass; return what ends it where rank 0 makes it alone, None where all ranks make it."""
        raise_failed()
        if self.is_made_by_all(model):
            self._full, self._fetched_at = {}, None
            self._hook_context.position.begin_pass()
            return None
        self._eager = False
        if self._fetched_at != self._hook_context.position.place():
            self._fetch(model)
        _running.append(self)
        for module in model.modules():
            for name, param in list(own_parameters(module)):
                if isinstance(param, DTensor):
                    put_tensor(module, name, self._full[id(param)])
                    self._undo.append(functools.partial(put_tensor, module, name, param))
            if is_unit(module):
                self._undo.append(suspend_unit(module))
                if module is not model:  # what it is given and returns is cast as torch does where it gathers
                    before = module.register_forward_pre_hook(self.inputs, with_kwargs=True)
                    after = module.register_forward_hook(lambda of, _, output: cast_output(of, output))
                    self._undo += [before.remove, after.remove]
        return self

    def inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments that a module's forward is to have, in the dtype of its mixed precision."""
        return cast_inputs(module, args), cast_inputs(module, kwargs)

    def end(self, model: nn.Module, output: Any = None) -> Any:
        """Give the modules their shards back; return the output in the dtype that mixed precision has it in."""
        _running.remove(self)
        while self._undo:
            self._undo.pop()()
        return cast_output(model, output)

    def _fetch(self, model: nn.Module) -> None:
        self._full = {}
        found, line, device = service(), script_line(), self._hook_context.device
        if found is None:
            raise AssertionError
        groups = [group for unit in model.modules() if is_unit(unit) for group in param_groups(unit)]
        dtypes = {
            id(each.sharded_param): mixed_precision_of(group).param_dtype
            for group in groups
            for each in group.fsdp_params
        }
        try:
            with torch.inference_mode(mode=False):  # a later pass may have gradients of what it is given
                for _, shard in sharded_parameters(model):
                    if id(shard) not in self._full:
                        full = found.full(shard, f"{self.name} at {line}").to(device, dtypes.get(id(shard)))
                        self._full[id(shard)] = nn.Parameter(full, requires_grad=False)
        finally:
            found.done()
        self._fetched_at = self._hook_context.position.place()
        many = short_count(sum(each.numel() for each in self._full.values()))
        self._hook_context.say_once(
            f"{line}: rank 0 alone calls {self.name}: it gets the full parameters ({many}), the others wait"
        )

    def is_alone_without_compiling(self, model: nn.Module) -> bool:
        """Return whether rank 0 makes the next pass alone, not compiled then; errors as `begin`. Collective."""
        self._eager = True
        self._eager = not self.is_made_by_all(model)
        return self._eager

    def is_made_by_all(self, model: nn.Module) -> bool:
        """Return whether all ranks make a pass that begins; errors as `begin`.

        In a script that has ranks of its own rank 0 may have more batches to evaluate, as under
        DistributedDataParallel: each further pass of an evaluation is looked at. A teacher makes one in each step.
        """
        if not self.turn(model):
            return False
        trains, steps = model.training and torch.is_grad_enabled(), self._hook_context.position.steps
        if not trains and self._hook_context.ownership.ranked:
            if self._evaluated_at == steps and not self._meet(model, "in evaluation"):
                return False
            self._evaluated_at = steps
        return True

    def turn(self, model: nn.Module) -> bool:
        """Return whether all ranks turn a model to evaluation, or back; False where rank 0 alone does, and can."""
        if model.training != self._training:
            if not self._meet(model, "in training" if model.training else "in evaluation"):
                return False
            self._training = model.training
        elif self._training and not torch.is_grad_enabled():
            lines = calling_lines()
            if lines not in self._without_gradients:
                called = lines.partition(", ")[2]
                if not self._meet(model, "without gradients", f" ({called})" if called else ""):
                    return False
                self._without_gradients.add(lines)
        return True

    def _meet(self, model: nn.Module, how: str, called: str = "") -> bool:
        """Return whether all ranks make a pass; False where rank 0 makes it alone, as it can."""
        found, call, context = service(), f"{self.name} {how}", self._hook_context
        if found is None:
            return True
        has_ranks = context.ownership.ranked or not context.ownership.ours
        at = f" at {calling_lines()}" if has_ranks else called
        if found.meets(call + at, _HINT if has_ranks or context.keeps_batch else _OWN_DRAWS):
            return True
        can_be_alone = (
            not (model.training and torch.is_grad_enabled())
            and is_unit(model)
            and context.data.size == context.size
            and all(is_over_all_ranks(shard) for _, shard in sharded_parameters(model))
            and (self._eager or not computes_compiled(model, context.module_registry.alive()))
        )
        if not can_be_alone:
            raise found.alone(call, _HINT)
        return False


_passes: "weakref.WeakKeyDictionary[nn.Module, Passes]" = weakref.WeakKeyDictionary()


def passes_of(model: nn.Module) -> Passes:
    """Return the passes of a model whose shards ranks hand over."""
    return _passes[model]


def serve_models_of_others(hook_context: HookContext) -> None:
    """Let rank 0 also save alone what the script itself, or accelerate, has sharded: from its first step on."""

    def serve_trained() -> None:
        if hook_context.ownership.ours:
            return
        groups = [group for optimizer in hook_context.built_optimizers() for group in optimizer.param_groups]
        params = [param for group in groups for param in group["params"] if _is_shard(param)]
        # In the order in which their modules were made, the same on all ranks.
        for model in hook_context.module_registry.roots_of(params)[0] if params else ():
            _serve(model, hook_context)

    if hook_context.size > 1:
        before_first_step(optimizers, serve_trained)


def _is_shard(param: Any) -> bool:
    return is_over_all_ranks(param) if isinstance(param, DTensor) else is_in_flat_parameter(param)


def _serve(model: nn.Module, hook_context: HookContext) -> None:
    """Let the ranks hand over their shards of a model. Collective."""
    if model in hook_context.numbers or not any(map(_is_shard, model.parameters())):
        return
    hook_context.number_model(model)
    open_once(hook_context)
    if is_compiled(model, hook_context.module_registry.alive()):
        return  # a hook would have it compiled again
    wrapped = model.module if isinstance(model, FullyShardedDataParallel) else model
    begin = untraced(Passes(model, original_class(wrapped).__name__, hook_context).begin)
    passes: list[Passes | None] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        alone = None if any(passes) else begin(module)  # a model may call itself
        passes.append(alone)
        return None if alone is None else alone.inputs(module, args, kwargs)

    def leave(module: nn.Module, _args: Any, output: Any) -> Any:
        alone = passes.pop() if passes else None
        return None if alone is None else alone.end(module, output)

    model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    model.register_forward_hook(leave, always_call=True)


_CALL_HINT = (
    "launch with --fsdp-auto-wrap-policy NO_WRAP, which gathers and averages the model as a whole, with zeros for"
    " what a rank's rows leave out of a ModuleList; or call every block and add its output times 0"
)
_GRADIENT_HINT = (
    "use every parameter on every rank: add the output of what its rows leave out times 0; or put such parts into"
    " an nn.ModuleList, of which ranks may use different ones"
)
_MOST_PLACES = 10_000


class _Ways:
    """What was done next at each place so far: the same on all ranks, because they meet where it is something new.

    A rank that does what is expected asks nobody. Where several things were done, ranks meet each time: each knows
    all of them, and may choose another.
    """

    def __init__(self) -> None:
        self._next: dict[Hashable, set[Hashable]] = {}

    def go(self, place: Hashable, then: Hashable, *, expected: bool, call: str, hint: str) -> None:
        """Do something next; together with all ranks where another may do something else, or be refused."""
        known = self._next.get(place, set())
        if len(known | {then}) > 1 or not (known or expected):
            try:
                check_all_ranks(call, hint)
            except CheckpointError as error:
                msg = f"{script_line()}: {error.message}"
                raise ShardingError(msg, hint=hint) from None
        if len(self._next) > _MOST_PLACES:  # on all ranks at once
            self._next.clear()
        self._next.setdefault(place, set()).add(then)


def note_gradients(model: nn.Module, name: str) -> None:
    """Have every rank look whether it has the gradients that are averaged; a model that was just sharded."""
    ways = _Ways()

    def look(group: Any) -> None:
        missing = names_without_gradient(group)
        what = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else "".join(missing)
        call = f"a backward of {name}" + (f" without a gradient of {what}" if what else " with all gradients")
        ways.go(id(group), missing, expected=not missing, call=call, hint=_GRADIENT_HINT)

    for unit in model.modules():
        before_reducing_gradients(unit, look)


def note_paths(model: nn.Module, name: str) -> None:
    """Have every rank follow its way through the units of a model that was just sharded.

    A place is all that was called in a pass so far: blocks that are called several times in each pass, in the same
    order, are not a choice. Outside of a pass of the model it is the unit that was called last.
    """
    units = {clean_name(path): unit for path, unit in model.named_modules() if is_unit(unit) and unit is not model}
    end, ways = "the end", _Ways()
    listed = set(itertools.pairwise(["", *units, end]))
    at, called, running, alone = "", 0, False, False

    def begin(*_: Any) -> None:
        nonlocal at, called, running, alone
        alone = bool(_running)
        if not torch.compiler.is_compiling() and not alone:
            at, called, running = "", 0, True

    def arrive(there: str) -> None:
        nonlocal at, called, running
        ends_alone = alone and there == end  # rank 0 has its shards again by then
        if torch.compiler.is_compiling() or _running or ends_alone:
            return
        call = f"{there} of {name}" + (f" after {at}" if at else "")
        ways.go((running, called, at), there, expected=(at, there) in listed, call=call, hint=_CALL_HINT)
        running = running and there != end
        called = hash((called, there)) if running else 0
        at = there

    def arriving(there: str) -> Callable[..., None]:  # no partial, which copies of the model would keep
        return lambda *_: arrive(there)

    if units:
        model.register_forward_pre_hook(begin)
        model.register_forward_hook(arriving(end))
    for unit_name, unit in units.items():
        unit.register_forward_pre_hook(arriving(unit_name), prepend=True)  # before it is gathered
