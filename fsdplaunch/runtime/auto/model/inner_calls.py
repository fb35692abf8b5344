"""Gather parameters around a part of a model that the script calls itself while it evaluates: `task.model(x)`.

Needed because FSDP2 gathers around the outermost module's `forward`, and what is in no unit of its own below it is
gathered there only. With gradients such a call stays an error: nothing would reduce them.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdplaunch.runtime.auto.state.rank0.full_passes import FullPasses
from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import is_in_pass, take_for_outermost
from fsdplaunch.runtime.torch_internals.tensors import apart_from_parameters

_inside: "weakref.WeakKeyDictionary[nn.Module, list[nn.Module]]" = weakref.WeakKeyDictionary()
"""For each model the part of it that was called by itself and computes now, with parameters gathered around it."""


def computes_in_part(model: nn.Module) -> bool:
    """Return whether a model's parameters are gathered around a part of it that the script has called."""
    return bool(_inside.get(model))


def gather_around_parts(
    model: nn.Module, begin_pass: Callable[[nn.Module], FullPasses | None], check_first: Callable[[], None]
) -> list[RemovableHandle]:
    """Hook the calls of the modules of the outermost unit.

    Args:
        model: Sharded, a unit itself.
        begin_pass: Called with the model before such a call; returns what gives rank 0 full parameters alone.
        check_first: Called before each of them, for it may come before the model's first pass.

    Returns:
        Handles of hooks that are needed until the model's first pass or that of a part.
    """
    if not is_unit(model):
        return []
    held = weakref.ref(model)
    inside = _inside.setdefault(model, [])

    ends: list[Callable[[], Any]] = []
    begin = _beginning(held, check_first)

    def enter(part: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or inside:
            return
        if torch.is_grad_enabled():
            _refuse_shards(part, args)
            return
        begin(part, args)
        model: Any = held()
        if not is_in_pass(model):
            inside.append(part)
            ends.append(_gathered(model, begin_pass(model)))

    def leave(part: nn.Module, _args: Any, output: Any) -> Any:
        if inside and inside[-1] is part:
            inside.pop()
            output = apart_from_parameters(output)
            ends.pop()()
        return output

    for part in _parts(model):
        part.register_forward_pre_hook(enter, prepend=True)
        part.register_forward_hook(leave, always_call=True)
    units = [unit for unit in model.modules() if unit is not model and is_unit(unit)]
    return [unit.register_forward_pre_hook(begin, prepend=True) for unit in units]


def _gathered(model: Any, alone: FullPasses | None) -> Callable[[], Any]:
    """Gather a model's parameters, unless rank 0 has full ones; return what ends that."""
    if alone is not None:
        return partial(alone.end, model)
    model.unshard()
    return model.reshard  # type: ignore[no-any-return]


def _refuse_shards(part: nn.Module, args: Any) -> None:
    """Refuse what torch computes with shards and one element, which it takes for alike on all ranks."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    alike = any(value.numel() == 1 and value.dim() and not isinstance(value, DTensor) for value in tensors)
    if alike and any(isinstance(param, DTensor) for param in part.parameters(recurse=False)):
        msg = f"{type(part).__name__} got mixed torch.Tensor and DTensor"
        raise RuntimeError(msg)


def _beginning(
    held: "weakref.ref[nn.Module]", check_first: Callable[[], None]
) -> Callable[[nn.Module, Any], None]:
    """Return a hook by which the model stays the outermost where a part of it is called first."""

    def begin(_part: nn.Module, _args: Any) -> None:
        model: Any = held()
        if not torch.compiler.is_compiling() and not is_in_pass(model):
            check_first()
            take_for_outermost(model)

    return begin


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with parameters below one that are in no other unit."""
    for child in module.children():
        if not is_unit(child):
            if next(child.parameters(), None) is not None:
                yield child
            yield from _parts(child)
