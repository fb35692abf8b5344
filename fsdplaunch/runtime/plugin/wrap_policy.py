"""The forms that users' wrap functions have, and the one form they are called in.

Torch has renamed the last argument: `unwrapped_params` up to 1.12, `nonwrapped_numel` since 1.13. By position both
are the same function.
"""

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, Protocol

from torch import nn

_ARGUMENTS = 3
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NUMEL = ("nonwrapped_numel", "unwrapped_params")


class RecursivePolicy(Protocol):
    """A wrap function of torch's form, called by position.

    `recurse` asks whether to look into the module, otherwise whether the module, with so many parameters that no
    module inside of it has taken, is a unit.
    """

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int, /) -> Any:
        """Return whether to look into a module, or whether it is a unit."""


def as_recursive(policy: Callable[..., Any]) -> RecursivePolicy | None:
    """Return a wrap function in torch's form, callable by position; None for a predicate of a module.

    Args:
        policy: A function, `functools.partial`, or object with `__call__`: of a module alone, or of a module,
            whether to recurse, and a number of parameters, under whatever names.
    """
    try:
        params = inspect.signature(policy).parameters
    except (TypeError, ValueError):  # of a builtin, which has no names to look at
        return None
    if _by_name(params) is not None:
        return _called_by_name(policy, str(_by_name(params)))
    positional = [each for each in params.values() if each.kind in _POSITIONAL]
    required = [each for each in positional if each.default is Parameter.empty]
    if any(each.kind is Parameter.VAR_POSITIONAL for each in params.values()):
        is_recursive = len(required) != 1
    else:
        is_recursive = len(positional) >= _ARGUMENTS and (len(required) > 1 or positional[1].name == "recurse")
    return policy if is_recursive else None


def _by_name(params: Any) -> str | None:
    """Return what the last argument is called where the arguments can be given by name only."""
    recurse = params.get("recurse")
    if recurse is None or recurse.kind is not Parameter.KEYWORD_ONLY:
        return None
    return next((name for name in _NUMEL if name in params), _NUMEL[0])


def _called_by_name(policy: Callable[..., Any], numel: str) -> RecursivePolicy:
    def call(module: nn.Module, recurse: bool, nonwrapped_numel: int, /) -> Any:
        return policy(module, recurse=recurse, **{numel: nonwrapped_numel})

    return call


def torch_form(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's wrap function as one that torch itself can call: with its own names for the arguments."""
    recursive = as_recursive(policy)
    if recursive is not None and "nonwrapped_numel" in inspect.signature(policy).parameters:
        return policy

    def call(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> Any:
        if recursive is not None:
            return recursive(module, recurse, nonwrapped_numel)
        return recurse or policy(module)

    return call
