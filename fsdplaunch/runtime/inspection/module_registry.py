"""A weak record of the modules that exist, to find the model that a parameter belongs to."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdplaunch.runtime.inspection.parameters import unwrapped
from fsdplaunch.runtime.sharding.wrap import runs
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

    def is_root(self, module: nn.Module) -> bool:
        """Return whether no module that can be called holds this one, directly or further up."""
        return module in self._tops([module])

    def roots_of(self, params: Iterable[Any]) -> tuple[list[nn.Module], list[Any]]:
        """Return the models that hold these parameters, and the parameters that no module holds."""
        wanted = {id(param): param for param in params}
        held = {module: {id(param) for _, param in own_parameters(module)} for module in self.alive()}
        holders = [module for module, own in held.items() if own & wanted.keys()]
        found = {key for module in holders for key in held[module]}
        return self._tops(holders), [param for key, param in wanted.items() if key not in found]

    def _tops(self, modules: list[nn.Module]) -> list[nn.Module]:
        """Return the outermost callable modules above the given ones, without torch.compile's wrappers."""
        parents: dict[int, list[nn.Module]] = {}
        for module in self.alive():
            if not isinstance(module, DistributedDataParallel):  # stands around a model, and is none
                for _, child in own_children(module):
                    parents.setdefault(id(child), []).append(module)
        tops = (unwrapped(_highest(module, parents)) for module in modules)
        return list({id(top): top for top in tops}.values())


def _highest(module: nn.Module, parents: dict[int, list[nn.Module]]) -> nn.Module:
    """Return the last callable module on the way up: lists and plain holders of models are not models."""
    level, seen, best = [module], {id(module)}, module
    while level:
        above = [p for m in level for p in parents.get(id(m), ()) if id(p) not in seen]
        seen.update(id(p) for p in above)
        best = next((p for p in above if runs(p)), best)
        level = above
    return best
