"""Which modules of a model are its repeated blocks, named by the user, by the model itself, or found."""

import difflib
import inspect
from collections import Counter
from collections.abc import Container, Iterable, Iterator

from torch import nn

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection.parameter_names import clean_name, count, parameters_of, unwrapped
from fsdplaunch.runtime.inspection.units import original_class
from fsdplaunch.runtime.torch_internals.wrappers import COMPILED_ATTRIBUTE

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
    """Return the model's blocks by name, in the model's order.

    The classes named; when none is, those in the model's own `_no_split_modules`; when it has none of these, the
    classes that stand side by side in its lists, outermost first.

    Raises:
        ShardingError: A class named is not in the model, or no blocks were found.
    """
    names = tuple(class_names)
    if names:
        _check_present(model, names)
        return _of_classes(model, names)
    own = _of_classes(model, getattr(model, "_no_split_modules", None) or ())
    found = own or _repeated(model, at_least=2) or _repeated(model, at_least=1, lists=(nn.ModuleList,))
    if not found:
        msg = f"no repeated blocks found in {class_name(model)}"
        hint = "name them in fsdp_transformer_layer_cls_to_wrap, or set fsdp_auto_wrap_policy to NO_WRAP"
        raise ShardingError(msg, hint=hint)
    return found


def _of_classes(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    wanted = set(names)
    return {clean_name(name): m for name, m in _named_modules(model) if class_name(m) in wanted and runs(m)}


def _repeated(
    model: nn.Module, *, at_least: int, lists: tuple[type[nn.Module], ...] = _LISTS
) -> dict[str, nn.Module]:
    """Return modules of one class that stand side by side in a list, none of them inside another."""
    found: dict[str, nn.Module] = {}
    for name, group in model.named_modules():
        if not _below(name, found) and isinstance(group, lists):
            found |= _side_by_side(name, list(group.named_children()), at_least)
    return {clean_name(name): module for name, module in found.items()}


def _below(name: str, blocks: Container[str]) -> bool:
    """Return whether a module is one of the blocks or inside one."""
    parts = name.split(".")
    return any(".".join(parts[:depth]) in blocks for depth in range(1, len(parts) + 1))


def _side_by_side(name: str, group: list[tuple[str, nn.Module]], at_least: int) -> dict[str, nn.Module]:
    children = {child: m for child, m in group if runs(m) and any(True for _ in parameters_of(m))}
    counts = Counter(class_name(m) for m in children.values())
    prefix = f"{name}." if name else ""
    return {prefix + child: m for child, m in children.items() if counts[class_name(m)] >= at_least}


def _check_present(model: nn.Module, names: Iterable[str]) -> None:
    present = {class_name(module) for module in model.modules() if runs(module)}
    missing = [name for name in names if name not in present]
    if not missing:
        return
    near = difflib.get_close_matches(missing[0], sorted(present), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    msg = f"no module of class {', '.join(missing)} in {class_name(model)}"
    raise ShardingError(msg, hint=f"{hint}classes there: {'; '.join(_candidates(model))}")


def _candidates(model: nn.Module) -> list[str]:
    """Return the classes a block could be, most parameters first: `4 x Block (1.2 M parameters each)`."""
    sizes: dict[str, list[int]] = {}
    for _, module in _named_modules(model):
        if module is not model and runs(module) and any(True for _ in module.children()):
            sizes.setdefault(class_name(module), []).append(sum(p.numel() for p in parameters_of(module)))
    ordered = sorted(sizes.items(), key=lambda item: -sum(item[1]))[:6]
    return [f"{len(n)} x {name} ({count(max(n))} parameters each)" for name, n in ordered if max(n)] or ["none"]
