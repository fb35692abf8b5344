"""A weak record of the modules that exist, to find the model that a parameter belongs to.

Needed because an optimizer gets parameters only, and a parameter does not know its module.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdplaunch.runtime.inspection.parameter_names import unwrapped
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.sharding.blocks import runs
from fsdplaunch.runtime.torch_internals.modules import is_built, own_children, own_parameters


class ModuleRegistry:
    """The modules that were made and are alive."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[nn.Module]] = {}

    def note(self, module: nn.Module) -> None:
        """Remember a module, weakly."""
        key = id(module)
        self._refs[key] = weakref.ref(module, lambda _: self._refs.pop(key, None))

    def alive(self) -> list[nn.Module]:
        """Return all modules."""
        found = (ref() for ref in list(self._refs.values()))
        return [module for module in found if module is not None and is_built(module)]

    def parents(self) -> dict[int, list[nn.Module]]:
        """Return, by the id of each module that others hold, those others."""
        parents: dict[int, list[nn.Module]] = {}
        for module in self.alive():
            if isinstance(module, DistributedDataParallel):
                continue  # stands around a model, and is none
            for _, child in own_children(module):
                parents.setdefault(id(child), []).append(module)
        return parents

    def is_root(self, module: nn.Module) -> bool:
        """Return whether no module that can be called holds this one, directly or further up."""
        return module in self._tops([module])

    def roots_of(self, params: Iterable[Any]) -> tuple[list[nn.Module], list[Any]]:
        """Return the models that hold these parameters, and the parameters that no module holds."""
        wanted = {id(param): param for param in params}
        holders: list[nn.Module] = []
        for module in self.alive():
            held = {id(param) for _, param in own_parameters(module)} & set(wanted)
            if held:
                holders.append(module)
        held = {id(param) for module in holders for _, param in own_parameters(module)}
        return self._tops(holders), [param for key, param in wanted.items() if key not in held]

    def _tops(self, modules: list[nn.Module]) -> list[nn.Module]:
        """Return the outermost callable modules above the given ones, without torch.compile's wrappers."""
        parents = self.parents()
        tops: dict[int, nn.Module] = {}
        for module in modules:
            top = unwrapped(_highest(module, parents))
            tops[id(top)] = top
        return list(tops.values())


def _highest(module: nn.Module, parents: dict[int, list[nn.Module]]) -> nn.Module:
    """Return the last callable module on the way up: lists and plain holders of models are no models."""
    level, seen, best = [module], {id(module)}, module
    while level:
        above = [p for m in level for p in parents.get(id(m), ()) if id(p) not in seen]
        seen.update(id(p) for p in above)
        best = next((p for p in above if runs(p)), best)
        level = above
    return best


@contextmanager
def registering_modules(module_registry: ModuleRegistry) -> Iterator[None]:
    """Note every module as it is made, built or unpickled or copied."""

    def noting(method: Any) -> Any:
        def note_and_go_on(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            module_registry.note(self)
            return method(self, *args, **kwargs)

        note_and_go_on.__wrapped__ = method  # type: ignore[attr-defined]
        return note_and_go_on

    with replaced(nn.Module, "__init__", noting), replaced(nn.Module, "__setstate__", noting):
        yield
