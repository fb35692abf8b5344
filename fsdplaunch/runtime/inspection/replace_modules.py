"""Put one module in the place of another, wherever a model holds it."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fsdplaunch.runtime.torch_internals.modules import own_children, put_child
from fsdplaunch.runtime.torch_internals.wrappers import WRAPPER_ATTRIBUTES


class ModulePlaces:
    """Where each module of a model is held, looked up once: a model of many units is walked once, not per unit."""

    def __init__(self, root: nn.Module) -> None:
        self._held: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for parent in root.modules():
            for name, child in own_children(parent):
                self._held.setdefault(child, []).append((parent, name))

    def exchange(self, old: nn.Module, new: nn.Module) -> None:
        """Put `new` wherever `old` was held; `old` itself may be inside of it."""
        for parent, name in self._held[old]:
            put_child(parent, name, new)


def replace_modules(root: nn.Module, new_for: dict[nn.Module, nn.Module]) -> None:
    """Exchange modules below `root` for others; one that is held in several places is exchanged in all."""
    places = ModulePlaces(root)
    for old, new in new_for.items():
        places.exchange(old, new)


@contextmanager
def without_wrappers(root: nn.Module) -> Iterator[None]:
    """Show a model's modules at the places where the user put them, for as long as nothing is computed with it.

    Libraries compare names in a state with places of modules, and find none inside a wrapper: FSDP1's, that of
    activation checkpointing, torch.compile's.
    """
    held = [(parent, name, child) for parent in root.modules() for name, child in own_children(parent)]
    wrapped = [place for place in held if _innermost(place[2]) is not place[2]]
    try:
        for parent, name, child in wrapped:
            put_child(parent, name, _innermost(child))
        yield
    finally:
        for parent, name, child in wrapped:
            put_child(parent, name, child)


def _innermost(module: nn.Module) -> nn.Module:
    inner = next((child for name, child in own_children(module) if name in WRAPPER_ATTRIBUTES), None)
    return module if inner is None else _innermost(inner)
