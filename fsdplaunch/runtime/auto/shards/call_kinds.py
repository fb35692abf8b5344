"""Find out what a call of a torch function does, by the operators that it runs on tensors without values.

No function is known by its name here, but for those that move tensors. A call is made once with tensors that have
no values, on the meta device, and torch's schemas and tags say of each operator that it runs whether it goes
element by element, draws, or writes. What cannot run without values needs the full tensors.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.torch_internals.dtensor import is_elementwise, is_random, written_arguments
from fsdplaunch.runtime.torch_internals.operators import operator_name
from fsdplaunch.runtime.torch_internals.tensors import TorchDispatchMode, storage_identity, tree_leaves, tree_map


class Kind(Enum):
    """What a call needs of the shards that it is given."""

    ASIDE = "nothing of their values: it asks for a size, a dtype, a flag"
    LOCAL = "of each element the elements at its place, so that every rank computes its own"
    UPDATES = "the same, and it writes into shards"
    DRAWS = "the full tensors, with random numbers that are the same on all ranks"
    FULL = "the full tensors"


_KEEPING = frozenset(
    {
        *("detach", "alias", "lift_fresh", "clone", "_to_copy", "copy_", "copy", "fill_", "fill", "zero_", "zero"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "_foreach_copy_", "_foreach_zero_"),
    }
)
"""Operators that go by element, which torch does not tag so."""
_CASTS = frozenset({"to", "cpu", "cuda", "pin_memory"})
"""Methods that move to a device, which tensors without values cannot do."""
_MOST = 4096
"""Calls of which the kind is remembered."""

_known: dict[Any, Kind] = {}


class Operators(TorchDispatchMode):
    """Records what the operators that run inside of it do.

    Attributes:
        count: How many have run.
        by_element: Whether all of them go element by element.
        draws: Whether one of them draws.
        written: The storages that were written into, by identity.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.by_element, self.draws = 0, True, False
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += 1
        name = operator_name(func)
        self.by_element = self.by_element and (name in _KEEPING or is_elementwise(func))
        self.draws = self.draws or is_random(func)
        result = func(*args, **kwargs)
        for each in tree_leaves(written_arguments(func, args, kwargs)):
            if isinstance(each, torch.Tensor):
                self.written.add(storage_identity(each))
        return result


def kind_of(func: Callable[..., Any], args: Any, kwargs: Any) -> Kind:
    """Return what a call needs of the shards among its arguments; remembered for calls that are alike.

    Args:
        func: A function of torch, or a method or a property of its tensors.
        args: What it is given, shards among it.
        kwargs: What it is given by name.
    """
    if getattr(func, "__name__", "") in _CASTS:
        return Kind.LOCAL
    try:
        key = func, _key(args), _key(kwargs)
        known = _known.get(key)
    except TypeError:  # an argument that has no hash
        return _find_out(func, args, kwargs)
    if known is None:
        if len(_known) > _MOST:
            _known.clear()
        known = _known[key] = _find_out(func, args, kwargs)
    return known


def _key(value: Any) -> Any:
    """Return what is equal for arguments with which a call does the same: of numbers that vary their type."""
    kind = type(value)
    if kind is float or kind is complex:
        return kind
    if isinstance(value, torch.Tensor):
        return isinstance(value, DTensor), value.shape, value.dtype
    if kind is tuple or kind is list:
        return kind, *map(_key, value)
    if kind is dict:
        return tuple((name, _key(each)) for name, each in value.items())
    if kind is slice:
        return kind, value.start, value.stop, value.step
    return kind, value


def _find_out(func: Callable[..., Any], args: Any, kwargs: Any) -> Kind:
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    shapes = {each.shape for each in given if isinstance(each, DTensor)}
    args, kwargs = tree_map(_on_meta, (args, kwargs))
    stand_ins = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    operators = Operators()
    try:
        with torch.no_grad(), operators:
            result = func(*args, **kwargs)
    except Exception:
        return Kind.DRAWS if operators.draws else Kind.FULL
    made = tree_leaves(result)
    if not operators.count and not any(isinstance(each, torch.Tensor) for each in made):
        return Kind.ASIDE
    if operators.draws:
        return Kind.DRAWS
    fits = all(isinstance(each, torch.Tensor) and each.shape in shapes for each in made if each is not None)
    if not (operators.by_element and fits):
        return Kind.FULL
    pairs = zip(given, stand_ins, strict=True)
    written = [
        isinstance(each, DTensor) for each, stand_in in pairs if storage_identity(stand_in) in operators.written
    ]
    if any(written):
        return Kind.UPDATES
    return Kind.FULL if written else Kind.LOCAL


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value
