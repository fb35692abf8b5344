"""The tensors in what a module is given or returns: in lists and mappings, and in objects of the script's own."""

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from fsdplaunch.runtime.torch_internals.tensors import tree_leaves

_DEEPEST = 3
"""How many objects within each other are looked into: torch_geometric's batches have tensors in the second."""
_MOST = 1000
"""How many values of one are looked at: what a batch refers to may refer to a whole dataset."""


def tensors_held(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, wherever they stand: alone, in a row or a mapping, in an object's attributes.

    Args:
        value: What a module is given, or has returned.
    """
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif _may_hold(type(leaf)):
            yield from tensors_of_object(leaf)


def tensors_of_object(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an object's attributes, which torch's own functions for trees take for nothing."""
    seen: set[int] = set()
    inside = [value]
    for _ in range(_DEEPEST):
        leaves = [leaf for each in inside if (held := _attributes(each)) for leaf in tree_leaves(held)]
        new = [leaf for leaf in leaves[:_MOST] if id(leaf) not in seen]
        seen.update(map(id, new))
        yield from (leaf for leaf in new if isinstance(leaf, torch.Tensor))
        inside = [leaf for leaf in new if _may_hold(type(leaf))]


def _may_hold(kind: type) -> bool:
    """Return whether objects of a class may have tensors as attributes, and are no models."""
    if kind.__module__ == "builtins" or kind.__module__.startswith(("torch.utils.data", "numpy")):
        return False
    return not issubclass(kind, torch.Tensor | torch.nn.Module | ModuleType | type)


def _attributes(value: Any) -> list[Any]:
    if isinstance(value, Mapping):  # such as UserDict's children, which torch does not know for mappings
        return list(value.values())
    named = getattr(value, "__dict__", None)
    slots = [name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    return [*(named or {}).values(), *(getattr(value, name) for name in slots if hasattr(value, name))]


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if not name.startswith("__"))
