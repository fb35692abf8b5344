"""Find the methods of a model, beside its forward, that compute with its parameters."""

import inspect

from torch import nn

_CHANGES = ("set", "load", "update", "init", "reset", "copy", "tie", "freeze", "save", "to", "register")
"""First words of methods that change parameters: gathered parameters are no place to do that."""


def computing_methods(model: nn.Module) -> list[str]:
    """Return the public methods of the model's own classes that compute.

    Not forward, nor those named after a change, nor those that train: gradients need passes of their own.
    """
    classes = [cls for cls in type(model).__mro__ if not cls.__module__.startswith(("torch.", "builtins"))]
    methods = [(name, value) for cls in classes for name, value in vars(cls).items() if inspect.isfunction(value)]
    names = dict.fromkeys(name for name, _ in methods)
    train = _training_methods({name: {*value.__code__.co_names} for name, value in methods})
    return [
        name
        for name in names
        if not name.startswith("_") and name not in train and name.split("_")[0] not in _CHANGES
    ]


def _training_methods(names_in: dict[str, set[str]]) -> set[str]:
    """Return forward and the methods that call backward, or another method that does.

    Args:
        names_in: For each method the names that its code has.
    """
    found = {"backward"}
    while more := {name for name, names in names_in.items() if name not in found and names & found}:
        found |= more
    return found | {"forward"}
