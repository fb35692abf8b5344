"""The tensors in what a module is given or returns: in lists and mappings, and in objects of the script's own."""

from collections.abc import Callable, Iterator, Mapping
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


def replace_tensors(value: Any, instead: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put other tensors in the place of those in an object's attributes, and in lists and mappings there.

    Args:
        value: An object that a module has made and returned, such as a cache of keys and values.
        instead: Returns what stands in the place of a tensor.
    """
    seen: set[int] = set()
    inside = [value]
    for _ in range(2 * _DEEPEST):
        found: list[Any] = []
        for each in inside:
            for place, held in list(_places(each)):
                if isinstance(held, torch.Tensor):
                    _put(each, place, instead(held))
                elif id(held) not in seen and (isinstance(held, list | tuple | Mapping) or _may_hold(type(held))):
                    seen.add(id(held))
                    found.append(held)
        inside = found


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    else:
        yield from getattr(value, "__dict__", {}).items()


def _put(value: Any, place: Any, tensor: torch.Tensor) -> None:
    if isinstance(value, list | dict):
        value[place] = tensor
    elif not isinstance(value, tuple | Mapping):
        setattr(value, place, tensor)
