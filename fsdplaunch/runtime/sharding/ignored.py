"""What of a model is not sharded (modules to ignore, parameters that cannot be split), or needs a unit of its own.

Parameters that cannot be split have no dimension, or are quantized: their storage is not a row of numbers, and
what their class keeps beside it would be lost with the class. FSDP2 takes one dtype among the trained parameters
of a unit, FSDP1 one dtype among all of them.
"""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from fsdplaunch.config.schema.kinds import alternatives
from fsdplaunch.display_text import listed
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection import clean_name, parameters_of
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.sharding.wrap import Units, runs
from fsdplaunch.runtime.torch_internals.modules import own_parameters

_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredParts:
    """What is not sharded, while the model is not sharded yet."""

    modules: dict[str, nn.Module]  # by clean name; with everything below them
    single: tuple[tuple[nn.Module, str], ...]  # places of parameters that cannot be split: module and attribute

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters as they are now, each once; materializing may have put others in their places."""
        inside = [param for module in self.modules.values() for param in parameters_of(module)]
        alone = [getattr(module, attribute) for module, attribute in self.single]
        return list({id(param): param for param in [*inside, *alone]}.values())

    def below(self) -> set[nn.Module]:
        """Return the ignored modules and all modules inside of them."""
        return {below for module in self.modules.values() for below in module.modules()}


def find_ignored(model: nn.Module, settings: Settings) -> IgnoredParts:
    """Find what is not sharded."""
    given = () if settings.ignored is None else settings.ignored
    names = {module: clean_name(name) for name, module in model.named_modules() if name}
    modules: dict[str, nn.Module] = {}
    for each in alternatives(given) if isinstance(given, str) else given:
        if isinstance(each, str):
            modules |= _matching(each, names, model)
        elif each in names:
            modules[names[each]] = each
        else:
            msg = f"ignored_modules has a {type(each).__name__} that is not in {type(model).__name__}"
            raise ShardingError(msg, hint="give modules of the model itself, or a regular expression")
    inside = {below for module in modules.values() for below in module.modules()}
    single = tuple(
        (module, attribute)
        for module in model.modules()
        if module not in inside
        for attribute, param in own_parameters(module)
        if param.dim() == 0 or (is_special(param) and not param.is_floating_point())
    )
    kinds = Counter(type(param).__name__ for m, name in single if is_special(param := getattr(m, name)))
    for kind, number in kinds.items():
        messages.say(
            f"{number} {kind} are kept in full on every rank: sharding would lose what their class stores with"
            " them; with a storage dtype such as bf16 (bnb_4bit_quant_storage) they are sharded"
        )
    return IgnoredParts(modules=modules, single=single)


def is_special(param: torch.Tensor) -> bool:
    """Return whether a frozen parameter is of a class of its own, as quantized ones are: it stays in its dtype.

    bitsandbytes keeps packed values in bytes, or in what looks like floating-point numbers.
    """
    return type(param) not in (nn.Parameter, torch.Tensor) and not param.requires_grad


def _matching(expression: str, names: dict[nn.Module, str], model: nn.Module) -> dict[str, nn.Module]:
    try:
        pattern = re.compile(expression)
    except re.error as error:
        msg = f"fsdp_ignored_modules is not a regular expression: {error}"
        raise ShardingError(msg, hint=f"got {expression!r}") from None
    found = {name: module for module, name in names.items() if pattern.fullmatch(name)}
    if not found:
        shown = ", ".join(list(names.values())[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        msg = f"fsdp_ignored_modules {expression!r} matches no module of {type(model).__name__}"
        raise ShardingError(msg, hint=f"the expression must match a full name; the first names are {shown}")
    return found


def separate_dtypes(model: nn.Module, units: Units, settings: Settings, skipped: Collection[int]) -> Units:
    """Give modules of another dtype than the rest of their unit one of their own, where that is possible.

    Returns the units, parents before children, with those added; parameters whose ids are skipped do not count.
    """
    borders = set(units.values())
    wanted = set(borders)
    for name, unit in {"": model, **units}.items():
        held = _held(unit, borders - {unit}, settings, skipped)
        sizes: Counter[torch.dtype] = Counter()
        for params in held.values():
            for _, dtype, param in params:
                sizes[dtype] += param.numel()
        if len(sizes) < 2:  # noqa: PLR2004  (one dtype is what a unit takes)
            continue
        most = sizes.most_common(1)[0][0]
        for module, params in held.items():
            odd = [each for each in params if each[1] != most]
            if not odd:
                continue
            inside = {dtype for below in module.modules() for _, dtype, _ in held.get(below, ())}
            users = sum(param is each[-1] for *_, param in odd for others in held.values() for each in others)
            if module is unit or len(inside) > 1 or not runs(module) or users > len(odd):
                short = [f"{param} in {str(dtype).removeprefix('torch.')}" for param, dtype, _ in odd]
                kept = str(most).removeprefix("torch.")
                msg = f"{name or type(unit).__name__} mixes parameters kept in {kept} with {listed(short, 3)}"
                hint = "convert the model to one dtype, set precision.master, or leave modules out"
                raise ShardingError(msg, hint=f"{hint} with fsdp_ignored_modules")
            wanted.add(module)
    if wanted == borders:
        return units
    return {clean_name(name): module for name, module in model.named_modules() if module in wanted}


_Held = dict[nn.Module, list[tuple[str, torch.dtype, nn.Parameter]]]


def _held(unit: nn.Module, borders: set[nn.Module], settings: Settings, skipped: Collection[int]) -> _Held:
    """Return what counts in a unit, with the dtype that it will be sharded in, by the module that holds it."""
    found: _Held = {}
    master, waiting = settings.dtypes.master, [("", unit)]
    while waiting:
        prefix, module = waiting.pop()
        for name, param in module.named_parameters(recurse=False):
            counts = param.requires_grad or settings.version == 1
            if counts and id(param) not in skipped:
                recast = master is not None and param.is_floating_point() and not is_special(param)
                dtype = master if recast and master is not None else param.dtype
                found.setdefault(module, []).append((prefix + name, dtype, param))
        waiting += [(f"{prefix}{n}.", child) for n, child in module.named_children() if child not in borders]
    return found
