"""What the wrap leaves to the root unit, and raise when that is too much to be meant."""

from collections.abc import Collection

from torch import nn

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection.parameter_names import clean_name, count, parameters_of
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.sharding.wrap import Units

_MOST = 0.5
_SHOWN = 3


def check_root_unit(model: nn.Module, units: Units, settings: Settings, skipped: Collection[int]) -> None:
    """Refuse a wrap that misses most of the model: the root's parameters are gathered all through the step.

    Embeddings and the output layer of a large vocabulary do not count: they belong to the root, and in a small
    model they are most of it. A function of the user's may choose what it likes.

    Args:
        model: Not sharded yet.
        units: As planned.
        settings: Has the policy.
        skipped: Ids of the parameters that are not sharded.

    Raises:
        ShardingError: More than half of what counts is in no unit.
    """
    if not units or not isinstance(settings.wrap, str):
        return
    missed, total = _missed(model, units, skipped)
    left = sum(missed.values())
    if left <= _MOST * total:
        return
    largest = sorted(missed, key=lambda name: -missed[name])[:_SHOWN]
    kinds = ", ".join(dict.fromkeys(class_name(unit) for unit in units.values()))
    msg = (
        f"{settings.wrap} leaves {count(left)} of {count(total)} parameters of {class_name(model)} in no unit: "
        f"it wraps {len(units)} x {kinds} only"
    )
    hint = f"the largest left are {', '.join(largest)}; name the blocks that hold them, or set NO_WRAP"
    raise ShardingError(msg, hint=hint)


def misses_most(model: nn.Module, units: Units) -> bool:
    """Return whether `check_root_unit` would refuse a wrap."""
    missed, total = _missed(model, units, ())
    return sum(missed.values()) > _MOST * total


def _missed(model: nn.Module, units: Units, skipped: Collection[int]) -> tuple[dict[str, int], int]:
    """Return what counts and is in no unit, with the numbers of values, and the number of all that counts."""
    in_units = {id(param) for unit in units.values() for param in parameters_of(unit)}
    uncounted = {*skipped, *_vocabulary(model)}
    counted = {name: param for name, param in model.named_parameters() if id(param) not in uncounted}
    missed = {clean_name(name): param.numel() for name, param in counted.items() if id(param) not in in_units}
    return missed, sum(param.numel() for param in counted.values())


def _vocabulary(model: nn.Module) -> set[int]:
    """Return ids of the parameters of embeddings, and of linear layers with one output per embedding."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    sizes = {module.num_embeddings for module in embeddings}
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in sizes]
    return {id(param) for module in [*embeddings, *heads] for param in parameters_of(module)}
