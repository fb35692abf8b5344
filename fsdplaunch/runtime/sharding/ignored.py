"""What of a model is not sharded: modules to ignore, and parameters that cannot be split.

These are parameters without a dimension, and quantised ones: their storage is no row of numbers, and what their
class keeps beside it would be lost with the class.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdplaunch.config.schema.parsers import alternatives
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection.parameter_names import clean_name, parameters_of
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.torch_internals.modules import own_parameters

_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredParts:
    """What is not sharded, while the model is not sharded yet.

    Attributes:
        modules: By clean name; with everything below them.
        single: Places of the parameters that cannot be split: the module and the attribute.
    """

    modules: dict[str, nn.Module]
    single: tuple[tuple[nn.Module, str], ...]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters as they are now, each once; materializing may have put others in their places."""
        inside = [param for module in self.modules.values() for param in parameters_of(module)]
        alone = [getattr(module, attribute) for module, attribute in self.single]
        return list({id(param): param for param in [*inside, *alone]}.values())

    def below(self) -> set[nn.Module]:
        """Return the ignored modules and all modules inside of them."""
        return {below for module in self.modules.values() for below in module.modules()}


def find_ignored(model: nn.Module, settings: Settings) -> IgnoredParts:
    """Find what is not sharded.

    Raises:
        ShardingError: An expression matches nothing, or a module given is not in the model.
    """
    modules = _ignored(model, settings)
    inside = {below for module in modules.values() for below in module.modules()}
    single = tuple(
        (module, attribute)
        for module in model.modules()
        if module not in inside
        for attribute, param in own_parameters(module)
        if param.dim() == 0 or (is_special(param) and not param.is_floating_point())
    )
    _tell_quantised(single)
    return IgnoredParts(modules=modules, single=single)


def is_special(param: torch.Tensor) -> bool:
    """Return whether a frozen parameter is of a class of its own, as quantised ones are.

    Such a parameter is left in the dtype it has: bitsandbytes keeps packed values in bytes, or in what looks like
    floating-point numbers.
    """
    return type(param) not in (nn.Parameter, torch.Tensor) and not param.requires_grad


def _tell_quantised(single: Sequence[tuple[nn.Module, str]]) -> None:
    kinds = Counter(type(param).__name__ for m, name in single if is_special(param := getattr(m, name)))
    for kind, number in kinds.items():
        messages.say(
            f"{number} {kind} are kept in full on every rank: sharding would lose what their class keeps beside"
            " them; with a storage dtype such as bf16 (bnb_4bit_quant_storage) they are sharded"
        )


def _ignored(model: nn.Module, settings: Settings) -> dict[str, nn.Module]:
    if settings.ignored is None:
        return {}
    given = alternatives(settings.ignored) if isinstance(settings.ignored, str) else settings.ignored
    names = {module: clean_name(name) for name, module in model.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for each in given:
        if isinstance(each, str):
            found |= _matching(each, names, model)
        elif each in names:
            found[names[each]] = each
        else:
            msg = f"ignored_modules has a {type(each).__name__} that is not in {type(model).__name__}"
            raise ShardingError(msg, hint="give modules of the model itself, or a regular expression")
    return found


def _matching(expression: str, names: dict[nn.Module, str], model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose full name the expression matches."""
    try:
        pattern = re.compile(expression)
    except re.error as error:
        msg = f"fsdp_ignored_modules is no regular expression: {error}"
        raise ShardingError(msg, hint=f"got {expression!r}") from None
    found = {name: module for module, name in names.items() if pattern.fullmatch(name)}
    if not found:
        first: Sequence[str] = list(names.values())[:_SHOWN]
        shown = ", ".join(first) + (", ..." if len(names) > _SHOWN else "")
        msg = f"fsdp_ignored_modules {expression!r} matches no module of {type(model).__name__}"
        raise ShardingError(msg, hint=f"the expression must match a full name; the first names are {shown}")
    return found
