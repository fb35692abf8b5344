"""Show the script the shards of a model outside of its passes, also where FSDP2 keeps parameters gathered.

Needed because the outermost unit stays gathered from a pass to its backward. What a script does there by
`model.parameters()`, clear gradients or change values, would be done to tensors that are thrown away; and a pass
that no backward follows would leave parameters gathered that an optimizer changes meanwhile: the next pass would
compute with the old ones.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.inspection.units import has_shards, is_unit, reshard
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.sharding.gradient_hooks import add_hook, hook_local_gradients
from fsdplaunch.runtime.state_dict.split_like import cut_to_shard
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import pass_look
from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import gathered_now, group_refs, still_gathered
from fsdplaunch.runtime.torch_internals.tensors import change_count


class GatheredView:
    """What one sharded model has gathered between its passes.

    Args:
        model: Sharded, a unit itself.
        trains: Return whether anything trains yet: a pass before that is a try, which no backward follows.
    """

    def __init__(self, model: nn.Module, trains: Callable[[], bool]) -> None:
        self.trains = trains
        self.groups = [ref for unit in model.modules() if is_unit(unit) for ref in group_refs(unit)]
        self.in_pass = pass_look(model) if is_unit(model) else _never
        self.kept: list[weakref.ref[Any]] = []
        self.changes: list[tuple[int, bool]] = []
        self.shown: list[tuple[int, bool]] = []

    def leave(self, model: nn.Module) -> None:
        """Note after a pass with gradients what stays gathered, and of which values."""
        if not self.trains():
            reshard(model)
            self.kept = []
            return
        self.kept = still_gathered(self.groups)
        pairs = self.pairs()
        self.changes = _changes(pairs)
        self.shown = _shown(pairs)

    def enter(self, model: nn.Module) -> None:
        """Give back before a pass what was gathered of values that have changed since.

        Raises:
            ShardingError: Both the shards and what was gathered have changed.
        """
        pairs = [] if not self.kept or self.in_pass() else self.pairs()
        if not pairs:
            return
        changed, written = _changes(pairs) != self.changes, _shown(pairs)
        if written != self.shown:
            if changed and [count for count, _ in written] != [count for count, _ in self.shown]:
                raise _changed_twice(model)
            self._take_over(pairs)
            changed = changed or _changes(pairs) != self.changes
        if changed:
            reshard(model)

    @torch.no_grad()
    def _take_over(self, pairs: list[tuple[Any, Any]]) -> None:
        """Do to the shards what the script did to gathered parameters, which it has as attributes."""
        for (gathered, shard), (changes, trained) in zip(pairs, self.shown, strict=False):
            if change_count(gathered) != changes:
                shard.copy_(cut_to_shard(gathered.detach(), shard))
            if gathered.requires_grad != trained:
                shard.requires_grad_(gathered.requires_grad)

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return the parameters that are still gathered, each with its shard."""
        return [pair for ref in self.kept for pair in gathered_now(ref)]


def _changes(pairs: list[tuple[Any, Any]]) -> list[tuple[int, bool]]:
    """Return what tells the values of shards, and what is frozen, from those of an earlier time."""
    return [(change_count(shard) + change_count(local_tensor(shard)), shard.requires_grad) for _, shard in pairs]


def _shown(pairs: list[tuple[Any, Any]]) -> list[tuple[int, bool]]:
    """Return the same of what was gathered, which the script has as attributes."""
    return [(change_count(gathered), gathered.requires_grad) for gathered, _ in pairs]


def _changed_twice(model: nn.Module) -> ShardingError:
    msg = (
        f"{script_line()}: parameters of {type(model).__name__} were changed as its attributes after a pass"
        " without a backward, and their shards by an optimizer or a loop"
    )
    hint = "change them by model.parameters(), or make that pass under torch.no_grad()"
    return ShardingError(msg, hint=hint)


def _never() -> bool:
    return False


_views: "weakref.WeakKeyDictionary[nn.Module, GatheredView]" = weakref.WeakKeyDictionary()


def view_of(model: nn.Module, trains: Callable[[], bool]) -> GatheredView:
    """Return what shows the script the shards of a model that was just sharded."""
    return _views.setdefault(model, GatheredView(model, trains))


@contextmanager
def showing_shards(hook_context: HookContext) -> Iterator[None]:
    """Let `parameters` and `named_parameters` give shards outside of passes, and `apply` change them. Rule 3.

    Hooks that the script registers at shards are called with the gradients that torch sets.
    """

    def listing(original: Any) -> Any:
        def named_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            shards = {} if torch.compiler.is_compiling() else _shards(_open())
            for name, param in original(self, *args, **kwargs):
                yield name, shards.get(id(param), param)

        return named_parameters

    def applying(original: Any) -> Any:
        def apply(self: nn.Module, function: Any) -> Any:
            for model in list(_open()):
                reshard(model)
            return original(self, function)

        return apply

    with ExitStack() as stack:
        stack.enter_context(replaced(nn.Module, "named_parameters", listing))
        stack.enter_context(replaced(nn.Module, "apply", applying))
        stack.enter_context(replaced(nn.Module, "share_memory", _sharing))
        stack.enter_context(replaced(DTensor, "register_hook", _registering(hook_context)))
        yield


def _open() -> Iterator[nn.Module]:
    """Yield the models that are not in a pass and have something gathered."""
    for model, view in list(_views.items()):
        if view.kept and not view.in_pass():
            yield model


def _shards(models: Iterable[nn.Module]) -> Mapping[int, Any]:
    """Return the shards of what models have gathered, by the ids of what is gathered."""
    return {id(gathered): shard for model in models for gathered, shard in _views[model].pairs()}


def _registering(hook_context: HookContext) -> Any:
    """Make the method that has a hook called with gradients of shards, for which torch calls none itself."""

    def register(original: Any) -> Any:
        def register_hook(tensor: Any, hook: Any) -> Any:
            own = str(getattr(hook, "__module__", "")).startswith(("fsdplaunch.", "torch."))
            if own or not hook_context.ownership.ours or not isinstance(tensor, nn.Parameter):
                return original(tensor, hook)
            handle = add_hook(tensor, hook)
            if hook_context.ownership.ranked:
                units = (each for model in hook_context.models for each in model.modules() if is_unit(each))
                hook_local_gradients(units, tensor)
            return handle

        return register_hook

    return register


def _sharing(original: Any) -> Any:
    def share_memory(self: nn.Module) -> Any:
        if has_shards(self):
            msg = (
                f"{script_line()} gives {class_name(self)} memory to share with processes of its own, and it is"
                " sharded: these would train copies that nobody reads"
            )
            hint = (
                "run the script with plain python; or have ranks do their work, and fsdplaunch.prepare the model"
            )
            raise ShardingError(msg, hint=hint)
        return original(self)

    return share_memory
