"""Which modules become units: each is gathered before it computes and freed after, as one."""

from collections import Counter
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection.parameter_names import clean_name, count, parameters_of
from fsdplaunch.runtime.plugin.wrap_policy import RecursivePolicy, as_recursive
from fsdplaunch.runtime.sharding.blocks import find_blocks, runs
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import wrap_policy_runner

Units = dict[str, nn.Module]
"""Modules by clean name, every parent before its children. The model itself is never among them."""


def plan_units(model: nn.Module, settings: Settings, left_out: set[nn.Module]) -> Units:
    """Choose the units of a model that is not sharded yet.

    A unit that shares a parameter with a module outside of it is no unit: its parameters stay with the parent's,
    because torch can give a shared parameter to one unit only.

    Args:
        model: The model.
        settings: Has the policy.
        left_out: Modules that are not sharded, with everything below them.

    Raises:
        ShardingError: A policy is set and chooses nothing.
    """
    chosen = _chosen(model, settings, left_out)
    units = {
        clean_name(name): module
        for name, module in model.named_modules()
        if module in chosen and module not in left_out and module is not model and _has_own(module, left_out)
    }
    if not units and not settings.wraps_nothing:
        raise _nothing_chosen(model, settings)
    kept = without_shared(model, units)
    if len(kept) < len(units):
        names = ", ".join(name for name in units if name not in kept)
        messages.say(f"{names}: shares parameters with other modules, so it is gathered together with them")
    return kept


def _chosen(model: nn.Module, settings: Settings, left_out: set[nn.Module]) -> set[nn.Module]:
    if settings.wraps_nothing:
        return set()
    if settings.wrap == "TRANSFORMER_BASED_WRAP":
        return set(find_blocks(model, settings.block_classes).values())
    if settings.wrap == "SIZE_BASED_WRAP":
        policy: Any = partial(size_based_auto_wrap_policy, min_num_params=settings.min_num_params)
        return _by_recursion(model, policy, left_out)
    return _by_function(model, settings.wrap, left_out)


def _by_function(model: nn.Module, policy: Any, left_out: set[nn.Module]) -> set[nn.Module]:
    """Ask a policy in one of the three forms users have: torch's objects, torch's functions, a plain predicate."""
    run_policy = wrap_policy_runner(policy)
    if run_policy is not None:
        return {module for module in run_policy(model, left_out, {}) if runs(module)}
    recursive = as_recursive(policy)
    if recursive is not None:
        return _by_recursion(model, recursive, left_out)
    return {module for module in model.modules() if runs(module) and policy(module)}


def _by_recursion(model: nn.Module, policy: RecursivePolicy, left_out: set[nn.Module]) -> set[nn.Module]:
    """Walk as torch's automatic wrapping does: bottom-up, counting what children have already taken."""
    chosen: set[nn.Module] = set()
    seen: set[nn.Module] = set()

    def taken_by(module: nn.Module) -> int:
        own = sum(param.numel() for param in parameters_of(module))
        seen.add(module)
        if not policy(module, True, own):
            return 0
        children = [child for child in module.children() if child not in left_out and child not in seen]
        taken = sum(taken_by(child) for child in children)
        is_unit = policy(module, False, own - taken)
        if module is not model and is_unit and runs(module):
            chosen.add(module)
            return own
        return taken

    taken_by(model)
    return chosen


def _has_own(module: nn.Module, left_out: set[nn.Module]) -> bool:
    """Return whether a module holds a parameter to shard; torch has nothing to do for one that does not."""
    return any(
        next(parameters_of(m, recurse=False), None) is not None for m in module.modules() if m not in left_out
    )


def _nothing_chosen(model: nn.Module, settings: Settings) -> ShardingError:
    largest = max((sum(p.numel() for p in parameters_of(child)) for child in model.children()), default=0)
    policy = settings.wrap if isinstance(settings.wrap, str) else "the wrap policy given"
    if settings.wrap == "SIZE_BASED_WRAP":
        msg = (
            f"SIZE_BASED_WRAP makes no unit of {type(model).__name__}: fsdp_min_num_params is "
            f"{settings.min_num_params}, its largest part has {largest} ({count(largest)}) parameters"
        )
        return ShardingError(msg, hint="set a smaller fsdp_min_num_params, or NO_WRAP")
    msg = f"{policy} makes no unit of {type(model).__name__}"
    return ShardingError(msg, hint="name other block classes, or set fsdp_auto_wrap_policy to NO_WRAP")


def without_shared(model: nn.Module, units: Units) -> Units:
    """Return the units that share no parameter with a module outside of them."""
    holders: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for param in parameters_of(module, recurse=False):
            holders.setdefault(id(param), set()).add(module)
    shared = [modules for modules in holders.values() if len(modules) > 1]
    places = _places(model)
    return {
        name: unit for name, unit in units.items() if not _splits(unit, shared) and not _is_shared(unit, places)
    }


def _splits(unit: nn.Module, shared: list[set[nn.Module]]) -> bool:
    inside = set(unit.modules())
    return any(modules & inside and modules - inside for modules in shared)


def _places(module: nn.Module) -> Counter[nn.Module]:
    """Return how often each module is in a module, and that in itself."""
    return Counter(each for _, each in module.named_modules(remove_duplicate=False))


def _is_shared(unit: nn.Module, places: Counter[nn.Module]) -> bool:
    """Return whether a layer inside of a unit is in the model by another way, too, such as in each block."""
    return any(
        places[each] > places[unit] * number and next(parameters_of(each, recurse=False), None) is not None
        for each, number in _places(unit).items()
    )
