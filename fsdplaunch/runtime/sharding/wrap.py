"""Which modules become units: each is gathered before it computes and freed after, as one.

Blocks are named by the user, by the model itself, or found; a wrap function may have any of the forms that users
have; and a wrap that misses most of the model is refused.
"""

import difflib
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from fsdplaunch.display_text import short_count
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection import clean_name, parameters_of, unwrapped
from fsdplaunch.runtime.inspection.units import original_class
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.torch_internals.fsdp import wrap_policy_runner
from fsdplaunch.runtime.torch_internals.modules import COMPILED_ATTRIBUTE

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def runs(module: nn.Module) -> bool:
    """Return whether a module can be called; lists and dictionaries of modules cannot."""
    forward = inspect.getattr_static(type(module), "forward")  # a ScriptModule's cannot be read from its class
    return forward is not nn.Module.forward or "forward" in module.__dict__


def class_name(module: nn.Module) -> str:
    """Return the name of the user's class, also of a module that is sharded or that torch.compile wraps."""
    return original_class(unwrapped(module)).__name__


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once; of a compiled one the wrapper, which is the one that is called."""
    return ((name, module) for name, module in model.named_modules() if not name.endswith(COMPILED_ATTRIBUTE))


def find_blocks(model: nn.Module, class_names: Iterable[str] = ()) -> dict[str, nn.Module]:
    """Return the model's blocks by name, in the model's order; a ShardingError where there are none.

    The classes named; when none is, those in the model's own `_no_split_modules`; when it has none of these, the
    classes that stand side by side in its lists, outermost first.
    """
    names = tuple(class_names)
    present = {class_name(module) for module in model.modules() if runs(module)}
    missing = [name for name in names if name not in present]
    if missing:
        near = difflib.get_close_matches(missing[0], sorted(present), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        msg = f"no module of class {', '.join(missing)} in {class_name(model)}"
        raise ShardingError(msg, hint=f"{hint}classes there: {'; '.join(_candidates(model))}")
    wanted = set(names or getattr(model, "_no_split_modules", None) or ())
    found = {clean_name(name): m for name, m in _named_modules(model) if class_name(m) in wanted and runs(m)}
    found = found or _repeated(model, at_least=2) or _repeated(model, at_least=1, lists=(nn.ModuleList,))
    if not found:
        msg = f"no repeated blocks found in {class_name(model)}"
        hint = "name them in fsdp_transformer_layer_cls_to_wrap, or set fsdp_auto_wrap_policy to NO_WRAP"
        raise ShardingError(msg, hint=hint)
    return found


def _repeated(
    model: nn.Module, *, at_least: int, lists: tuple[type[nn.Module], ...] = _LISTS
) -> dict[str, nn.Module]:
    """Return modules of one class that stand side by side in a list, none of them inside another."""
    found: dict[str, nn.Module] = {}
    for name, group in model.named_modules():
        parts = name.split(".")
        is_below = any(".".join(parts[:depth]) in found for depth in range(1, len(parts) + 1))
        if not is_below and isinstance(group, lists):
            children = {c: m for c, m in group.named_children() if runs(m) and any(True for _ in parameters_of(m))}
            counts = Counter(map(class_name, children.values()))
            prefix = f"{name}." if name else ""
            found |= {prefix + c: m for c, m in children.items() if counts[class_name(m)] >= at_least}
    return {clean_name(name): module for name, module in found.items()}


def _candidates(model: nn.Module) -> list[str]:
    """Return the classes a block could be, most parameters first: `4 x Block (1.2 M parameters each)`."""
    sizes: dict[str, list[int]] = {}
    for _, module in _named_modules(model):
        if module is not model and runs(module) and any(True for _ in module.children()):
            sizes.setdefault(class_name(module), []).append(_size(module))
    ordered = sorted(sizes.items(), key=lambda item: -sum(item[1]))[:6]
    found = [f"{len(n)} x {name} ({short_count(max(n))} parameters each)" for name, n in ordered if max(n)]
    return found or ["none"]


def _size(module: nn.Module) -> int:
    return sum(param.numel() for param in parameters_of(module))


def is_recursive(policy: Callable[..., Any]) -> bool:
    """Return whether a wrap function is of torch's form, and no predicate of a module.

    Torch calls `policy(module=..., recurse=..., nonwrapped_numel=...)`: with `recurse` to know whether to look
    into the module, without whether it, with so many parameters that none inside of it has taken, is a unit.
    """
    try:
        return "recurse" in inspect.signature(policy).parameters
    except (TypeError, ValueError):  # of a builtin, which has no names to look at
        return False


def torch_form(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's wrap function as one that torch itself can call."""
    if is_recursive(policy):
        return policy
    return lambda module, recurse, nonwrapped_numel: recurse or policy(module)  # noqa: ARG005  (torch's names)


Units = dict[str, nn.Module]
"""Modules by clean name, every parent before its children. The model itself is never among them."""


def plan_units(model: nn.Module, settings: Settings, left_out: set[nn.Module]) -> Units:
    """Choose the units of a model that is not sharded yet.

    A module that shares a parameter with one outside of it is not a unit: its parameters stay with the parent's,
    because torch can give a shared parameter to one unit only.
    A policy that chooses nothing, but for what is left out, is an error.
    """
    chosen = _chosen(model, settings, left_out)
    units = {}
    for name, module in model.named_modules():
        if module is not model and module in chosen and module not in left_out:
            held = (parameters_of(m, recurse=False) for m in module.modules() if m not in left_out)
            if any(True for params in held for _ in params):  # else torch has nothing to do
                units[clean_name(name)] = module
    if not units and not settings.wraps_nothing:
        policy = settings.wrap if isinstance(settings.wrap, str) else "the wrap policy given"
        msg = f"{policy} finds no unit in {type(model).__name__}"
        hint = "name other block classes, or set fsdp_auto_wrap_policy to NO_WRAP"
        if settings.wrap == "SIZE_BASED_WRAP":
            largest = max(map(_size, model.children()), default=0)
            size = f"its largest part has {largest} ({short_count(largest)}) parameters"
            msg = f"{msg}: fsdp_min_num_params is {settings.min_num_params}, {size}"
            hint = "set a smaller fsdp_min_num_params, or NO_WRAP"
        raise ShardingError(msg, hint=hint)
    kept = without_shared(model, units)
    if len(kept) < len(units):
        names = ", ".join(name for name in units if name not in kept)
        messages.say(f"{names}: shares parameters with other modules, so it is gathered together with them")
    return kept


def _chosen(model: nn.Module, settings: Settings, left_out: set[nn.Module]) -> set[nn.Module]:
    """Ask the policy; a function of the user's has torch's form or is a predicate, and torch has objects, too."""
    policy: Any = settings.wrap
    if settings.wraps_nothing:
        return set()
    if policy == "TRANSFORMER_BASED_WRAP":
        return set(find_blocks(model, settings.block_classes).values())
    if policy == "SIZE_BASED_WRAP":
        policy = partial(size_based_auto_wrap_policy, min_num_params=settings.min_num_params)
    run_policy = wrap_policy_runner(policy)
    if run_policy is not None:
        return {module for module in run_policy(model, left_out, {}) if runs(module)}
    if is_recursive(policy):
        return _by_recursion(model, policy, left_out)
    return {module for module in model.modules() if runs(module) and policy(module)}


def _by_recursion(model: nn.Module, policy: Callable[..., Any], left_out: set[nn.Module]) -> set[nn.Module]:
    """Walk as torch's automatic wrapping does: bottom-up, counting what children have already taken."""
    chosen: set[nn.Module] = set()
    seen: set[nn.Module] = set()

    def taken_by(module: nn.Module) -> int:
        own = _size(module)
        seen.add(module)
        if not policy(module=module, recurse=True, nonwrapped_numel=own):
            return 0
        children = [child for child in module.children() if child not in left_out and child not in seen]
        taken = sum(taken_by(child) for child in children)
        is_unit = policy(module=module, recurse=False, nonwrapped_numel=own - taken)
        if module is not model and is_unit and runs(module):
            chosen.add(module)
            return own
        return taken

    taken_by(model)
    return chosen


def without_shared(model: nn.Module, units: Units) -> Units:
    """Return the units that share no parameter with a module outside of them, and no layer with another place."""
    holders: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for param in parameters_of(module, recurse=False):
            holders.setdefault(id(param), set()).add(module)
    shared = [modules for modules in holders.values() if len(modules) > 1]
    places = Counter(each for _, each in model.named_modules(remove_duplicate=False))

    def is_alone(unit: nn.Module) -> bool:
        inside = Counter(each for _, each in unit.named_modules(remove_duplicate=False))
        splits = any(modules & inside.keys() and modules - inside.keys() for modules in shared)
        return not splits and not any(
            places[each] > places[unit] * number and next(parameters_of(each, recurse=False), None) is not None
            for each, number in inside.items()
        )

    return {name: unit for name, unit in units.items() if is_alone(unit)}


_MOST = 0.5


def check_root_unit(model: nn.Module, units: Units, settings: Settings, skipped: Collection[int]) -> None:
    """Refuse a wrap that misses most of the model: the root's parameters are gathered all through the step.

    Embeddings and the output layer of a large vocabulary do not count: they belong to the root, and in a small
    model they are most of it. A function of the user's may choose what it likes.
    """
    if not units or not isinstance(settings.wrap, str):
        return
    missed, total = _missed(model, units, skipped)
    left = sum(missed.values())
    if left <= _MOST * total:
        return
    largest = sorted(missed, key=lambda name: -missed[name])[:3]
    kinds = ", ".join(dict.fromkeys(class_name(unit) for unit in units.values()))
    msg = (
        f"{settings.wrap} leaves {short_count(left)} of {short_count(total)} parameters of {class_name(model)}"
        f" in no unit: it wraps {len(units)} x {kinds} only"
    )
    hint = f"the largest left are {', '.join(largest)}; name the blocks that hold them, or set NO_WRAP"
    raise ShardingError(msg, hint=hint)


def misses_most(model: nn.Module, units: Units) -> bool:
    """Return whether `check_root_unit` would refuse a wrap."""
    missed, total = _missed(model, units, ())
    return sum(missed.values()) > _MOST * total


def _missed(model: nn.Module, units: Units, skipped: Collection[int]) -> tuple[dict[str, int], int]:
    """Return what counts and is in no unit, with the numbers of values, and the number of all that counts."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    sizes = {module.num_embeddings for module in embeddings}
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in sizes]
    vocabulary = {id(param) for module in [*embeddings, *heads] for param in parameters_of(module)}
    in_units = {id(param) for unit in units.values() for param in parameters_of(unit)}
    uncounted = {*skipped, *vocabulary}
    counted = {name: param for name, param in model.named_parameters() if id(param) not in uncounted}
    missed = {clean_name(name): param.numel() for name, param in counted.items() if id(param) not in in_units}
    return missed, sum(param.numel() for param in counted.values())
