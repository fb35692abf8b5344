"""Which layers of a model are split and how: by the configuration, else by the plan the model brings along."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdplaunch.errors import ShardingError
from fsdplaunch.name_lists import listed
from fsdplaunch.runtime.inspection.parameter_names import clean_name
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.tensor_parallel.styles import ROPE, STYLES, known_styles

_KEY = "sharding.tensor_parallel_plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStyle:
    """What a plan says of one module or parameter: its clean name, the pattern that matched, and the style."""

    name: str
    pattern: str
    style: str


def find_plan(model: nn.Module, configured: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return patterns of names with their styles, and whose they are.

    Raises:
        ShardingError: Neither the configuration nor the model has a plan.
    """
    if configured:
        return dict(configured), _KEY
    for prefix, module in model.named_modules():
        own = _own_plan(module)
        if own:
            start = f"{clean_name(prefix)}." if prefix else ""
            return {start + pattern: style for pattern, style in own.items()}, f"{class_name(module)}'s own plan"
    msg = f"{class_name(model)} has no plan of how its layers can be split"
    raise ShardingError(msg, hint=f"write one as {_KEY}, such as {{layers.*.up: colwise, layers.*.down: rowwise}}")


def _own_plan(module: nn.Module) -> dict[str, str]:
    """Return the plan that a model of transformers brings along, complete for it and what is inside."""
    config: Any = _not_of_what_is_inside(module, "config")
    is_wrapper = not hasattr(type(module), "base_model_prefix")  # PeftModel has the configuration of what it wraps
    of_base = {} if is_wrapper else getattr(config, "base_model_tp_plan", None) or {}
    own = dict(_not_of_what_is_inside(module, "_tp_plan") or {})
    base = getattr(module, "base_model_prefix", "")
    if not own and not of_base:
        return {}
    inner = getattr(module, base, None) if base else None
    prefix = f"{base}." if isinstance(inner, nn.Module) and inner is not module else ""
    return {**{prefix + pattern: style for pattern, style in of_base.items()}, **own}


def _not_of_what_is_inside(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module; wrappers, such as those of adapters, pass on those of the model inside."""
    return module.__dict__.get(name) or (getattr(module, name) if hasattr(type(module), name) else None)


def matches(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, list[NamedStyle]]]:
    """Yield each pattern with what it matches: modules and parameters whose full name it is, `*` for one part."""
    names = [clean_name(name) for name, _ in model.named_modules(remove_duplicate=False) if name]
    names += [clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        found = [name for name in dict.fromkeys(names) if expression.fullmatch(name)]
        yield pattern, [NamedStyle(name=name, pattern=pattern, style=style) for name in found]


def matched(model: nn.Module, plan: Mapping[str, str], *, strict: bool) -> dict[str, NamedStyle]:
    """Return the style of each module or parameter that a plan names.

    Args:
        model: Not sharded yet.
        plan: Patterns and styles.
        strict: Whether a pattern that matches nothing is an error. Models' own plans have such for layers that
            other variants of the model have.

    Raises:
        ShardingError: A style is not known, a pattern matches nothing, or two say different things.
    """
    found: dict[str, NamedStyle] = {}
    for pattern, named in matches(model, plan):
        if plan[pattern] not in (*STYLES, ROPE) and (strict or named):
            msg = f"{pattern}: {plan[pattern]} is no style to split a layer"
            raise ShardingError(msg, hint=f"the styles are {', '.join(known_styles())}")
        if strict and not named:
            raise _nothing_matched(model, pattern)
        for one in named:
            other = found.setdefault(one.name, one)
            if other.style != one.style:
                msg = f"{one.name} is {other.style} by {other.pattern} and {one.style} by {pattern}"
                raise ShardingError(msg, hint=f"let one pattern of {_KEY} match it")
    return found


def _nothing_matched(model: nn.Module, pattern: str) -> ShardingError:
    last = pattern.rsplit(".", 1)[-1]
    near = [clean_name(name) for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] == last]
    names = near or [
        clean_name(name) for name, module in model.named_modules() if name and not [*module.children()]
    ]
    msg = f"{_KEY}: {pattern} matches no module and no parameter of {class_name(model)}"
    return ShardingError(msg, hint=f"names there: {listed(names, 6)}")
