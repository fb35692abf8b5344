"""The parameters that a script sees are the shards: outside of passes, and where it took them before sharding.

The outermost unit stays gathered from a pass to its backward. What a script does there by `model.parameters()`
would be done to tensors that are thrown away, and so would what a model's own forward writes into parameters.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto import HookContext
from fsdplaunch.runtime.auto.full_values import full_value
from fsdplaunch.runtime.inspection import named_parameters
from fsdplaunch.runtime.inspection.units import is_unit, original_class, reshard
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.sharding.gradients import add_hook, hook_local_gradients
from fsdplaunch.runtime.sharding.optimizers import ORIGIN
from fsdplaunch.runtime.state_dict.gather import cut_to_shard
from fsdplaunch.runtime.torch_internals.distributed import local_tensor
from fsdplaunch.runtime.torch_internals.fsdp import (
    before_giving_back,
    call_when_gathered,
    gathered_now,
    group_refs,
    pass_look,
    places_of_shards,
    still_gathered,
)
from fsdplaunch.runtime.torch_internals.modules import is_made_by_compiler
from fsdplaunch.runtime.torch_internals.tensors import change_count, counted_changes, tree_map


class GatheredView:
    """What one sharded model has gathered between its passes. One before anything `trains` has no backward."""

    def __init__(self, model: nn.Module, trains: Callable[[], bool]) -> None:
        self.trains = trains
        self.groups = [ref for unit in model.modules() if is_unit(unit) for ref in group_refs(unit)]
        self.in_pass = pass_look(model) if is_unit(model) else lambda: False
        self.kept: list[weakref.ref[Any]] = []
        self.changes: list[tuple[int, bool]] = []
        self.shown: list[tuple[int, bool]] = []
        _views[model] = self

    def leave(self, model: nn.Module) -> None:
        """Note after a pass with gradients what stays gathered, and of which values."""
        if not self.trains():
            reshard(model)
            self.kept = []
            return
        self.kept = still_gathered(self.groups)
        self.changes, self.shown = _changes(self.pairs())

    def enter(self, model: nn.Module) -> None:
        """Give back before a pass what was gathered of values that have changed since."""
        if not self.kept or self.in_pass():
            return
        pairs = self.pairs()
        if not pairs:
            # A backward has given all back: what a pass without gradients gathers next is not what was noted.
            self.kept = []
            return
        changes, shown = _changes(pairs)
        changed = changes != self.changes
        if shown != self.shown and changed and [each for each, _ in shown] != [each for each, _ in self.shown]:
            msg = (
                f"{script_line()}: parameters of {type(model).__name__} were changed as attributes after a"
                " pass without a backward, and their shards were changed by an optimizer or a loop"
            )
            hint = "change them through model.parameters(), or make that pass under torch.no_grad()"
            raise ShardingError(msg, hint=hint)
        for gathered, shard in pairs:
            if gathered.requires_grad != shard.requires_grad and shown != self.shown:
                shard.requires_grad_(gathered.requires_grad)
        if changed or shown != self.shown:
            reshard(model)  # which writes into the shards what was written as attributes

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return the parameters that are still gathered, each with its shard."""
        return [pair for ref in self.kept for pair in gathered_now(ref)]


def _changes(pairs: list[tuple[Any, Any]]) -> tuple[list[tuple[int, bool]], list[tuple[int, bool]]]:
    """Return what differs where shards have other values or are frozen, and the same of what the script sees."""
    of_shards = [(change_count(each) + change_count(local_tensor(each)), each.requires_grad) for _, each in pairs]
    return of_shards, [(change_count(gathered), gathered.requires_grad) for gathered, _ in pairs]


_views: "weakref.WeakKeyDictionary[nn.Module, GatheredView]" = weakref.WeakKeyDictionary()


def name_parameters(
    original: Any, _: HookContext, module: nn.Module, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, Any]]:
    """Stand for `Module.named_parameters`, which gives shards outside of passes."""
    named = original(module, *args, **kwargs)
    shards = {id(gathered): shard for model in _open() for gathered, shard in _views[model].pairs()}
    return ((name, shards.get(id(param), param)) for name, param in named) if shards else named


def apply(original: Any, _: HookContext, module: nn.Module, function: Any) -> Any:
    """Stand for `Module.apply`, which changes shards."""
    for model in list(_open()):
        reshard(model)
    return original(module, function)


def _open() -> Iterator[nn.Module]:
    """Yield the models that are not in a pass and have something gathered."""
    for model, view in list(_views.items()):
        if view.kept and not view.in_pass():
            yield model


def register_hook(original: Any, hook_context: HookContext, tensor: Any, hook: Any) -> Any:
    """Stand for `DTensor.register_hook`: a script's hook is called with the gradients that torch sets of shards.

    Torch calls none itself: the gradient of a pass is that of what was gathered.
    """
    own = str(getattr(hook, "__module__", "")).startswith(("fsdplaunch.", "torch."))
    if own or not hook_context.ownership.ours or not isinstance(tensor, nn.Parameter):
        return original(tensor, hook)
    handle = add_hook(tensor, hook)
    if hook_context.ownership.ranked:
        units = (each for model in hook_context.models for each in model.modules() if is_unit(each))
        hook_local_gradients(units, tensor)
    return handle


_gathered: dict[int, "weakref.ref[torch.Tensor]"] = {}
"""The tensors that torch gathers parameters into, by their ids."""
_taken: set[int] = set()  # those whose `.data` was taken in this pass: what is written there is not counted


class KeptWrites:
    """How often the parameters of one group were changed until it last gave them back, and what was written.

    Looked at where the group gives back, and not by hooks: those of the script may write before and after ours.
    """

    def __init__(self, group: "weakref.ref[Any]") -> None:
        self.group = group
        self.gathered: list[torch.Tensor] = []
        self.counts: list[int] = []
        call_when_gathered(group, self.note)
        before_giving_back(group, self.gathered, self.counts, _taken, self.keep)

    def note(self, gathered: torch.Tensor) -> None:
        """Know a parameter's tensor, into which torch gathers from then on."""
        number = id(gathered)
        _gathered[number] = weakref.ref(gathered, lambda _: _gathered.pop(number, None))
        self.gathered.append(gathered)
        self.counts.append(counted_changes(gathered))

    @torch.no_grad()
    def keep(self) -> None:
        """Write into the shards what has changed: gathered in a lower precision, the rest is rounded."""
        before, self.counts[:] = list(self.counts), map(counted_changes, self.gathered)
        for earlier, now, (gathered, shard) in zip(before, self.counts, gathered_now(self.group), strict=False):
            if now != earlier or id(gathered) in _taken:
                _taken.discard(id(gathered))
                local = local_tensor(shard)
                new = local_tensor(cut_to_shard(gathered.detach(), shard))
                local.copy_(torch.where(new != local.to(new.dtype), new.to(local.dtype), local))


def data_of_parameters(hook_context: HookContext) -> property:
    """Return what stands for `.data`: what is written there in a pass is looked for when the pass ends."""
    take, put = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]

    def is_gathered(param: Any) -> bool:
        known = _gathered.get(id(param))
        return known is not None and known() is param

    def take_data(param: Any) -> Any:
        if is_gathered(param):
            _taken.add(id(param))
        return take(param)

    def put_data(param: Any, value: Any) -> None:
        if isinstance(value, DTensor) and hook_context.ownership.ours:  # with which torch crashes
            value = full_value(value, call="the data of a parameter")
        if is_gathered(param) and value.shape == param.shape:
            _taken.add(id(param))
            take(param).copy_(value)  # torch gathers into the same memory again
        else:
            put(param, value)

    return property(take_data, put_data)


_SHARD = "fsdplaunch_shard"
_OWN = frozenset({_SHARD, ORIGIN, "__torch_function__", "__dict__", "__weakref__", "__hash__"})
"""What a reference has itself; everything else is its shard's."""


class ShardReference(nn.Parameter):
    """A full parameter that something held when its model was sharded: it keeps its identity, and is its shard."""

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name) if name in _OWN else getattr(_shard_of(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_shard_of(self), name, with_shards(value))

    def __delattr__(self, name: str) -> None:
        delattr(_shard_of(self), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*with_shards(args), **with_shards(kwargs or {}))


def _shard_of(reference: ShardReference) -> Any:
    return object.__getattribute__(reference, "__dict__")[_SHARD]


def with_shards(value: Any) -> Any:
    """Return lists, tuples and dicts of values with shards in the place of references to them."""
    return tree_map(lambda each: _shard_of(each) if type(each) is ShardReference else each, value)


@contextmanager
def keeping_references(model: nn.Module) -> Iterator[None]:
    """Let every full parameter that is still held after the model is sharded inside stand for its shard."""
    full = {name: weakref.ref(param) for name, param in named_parameters(model)}
    yield
    for name, shard in named_parameters(model):
        held = full[name]() if name in full else None
        if type(held) is nn.Parameter and isinstance(shard, DTensor):
            held.data = held.data.new_empty(0)  # or each rank would go on to hold the full model
            held.__dict__[_SHARD] = shard
            held.__class__ = ShardReference


def register_parameter(original: Any, hook_context: HookContext, module: nn.Module, name: str, param: Any) -> None:
    """Stand for `Module.register_parameter`: a shard keeps its name, by which torch gathers it.

    Pruning and parametrizations would give it another. Torch itself registers shards in every pass.
    """
    if isinstance(param, DTensor) and not is_made_by_compiler(module):
        model, line, places = _home_of(param, hook_context)
        if model is not None and (id(module), name) not in places:
            raise late_parameter(model, name, line)
    original(module, name, param)


_homes: "weakref.WeakKeyDictionary[nn.Module, dict[int, Any]]" = weakref.WeakKeyDictionary()
"""For each model, by the ids of shards: these, and the ids of their modules with their attributes.

Shards are held, not referred to weakly: torch swaps no tensor that a weak reference is to (`model.to`).
"""


def _home_of(shard: Any, hook_context: HookContext) -> tuple[nn.Module | None, str, set[tuple[int, str]]]:
    """Return a shard's model, the line that sharded it, and its modules' ids with their attributes.

    Looked for once: torch registers the shards of recurrent layers in every pass.
    """
    for model, line in hook_context.models.items():
        held, places = _homes.get(model, {}).get(id(shard), (None, set()))
        if held is shard:
            return model, line, places
    for model, line in hook_context.models.items():
        for unit in filter(is_unit, model.modules()):
            for each, homes in places_of_shards(unit):
                if each is shard:
                    places = {(id(home), name) for home, name in homes}
                    _homes.setdefault(model, {})[id(shard)] = shard, places
                    return model, line, places
    return None, "", set()


def late_parameter(model: nn.Module, name: str, line: str) -> ShardingError:
    """Return the error for a parameter that a model got after it was sharded."""
    kind = original_class(model).__name__
    msg = f"{script_line()}: {name} of {kind} appeared after the model was sharded at {line}"
    hint = "complete the model before that line, or call fsdplaunch.prepare(model, optimizer) when it is complete"
    return ShardingError(msg, hint=hint)


def refuse_exchange() -> ShardingError:
    """Return the error for a collective of the script's own that is given shards."""
    msg = f"{script_line()} exchanges parameters or gradients of a sharded model: they are averaged already"
    hint = (
        "leave the exchange out: what is given to DistributedDataParallel has the same parameters and gradients on"
        " all ranks; or launch with --hide-ranks, if the script then trains in one process, or with --shard off"
    )
    return ShardingError(msg, hint=hint)
