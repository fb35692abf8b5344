"""Compute the steps of torch's own optimizers with each rank's shards as plain tensors: bit for bit the same.

Needed because DTensor dispatches each operator in Python: on a CPU, or with many small parameters, that takes
longer than all that a step computes. Some of what they compute it does not know at all.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor, placements_of, with_local_tensor
from fsdplaunch.runtime.torch_internals.tensors import note_changes

_FUNCTIONS = (
    *("adadelta", "adagrad", "adam", "adamax", "adamw", "asgd"),
    *("nadam", "radam", "rmsprop", "rprop", "sgd"),
)
"""Each in a module of its name: it gets lists of parameters, gradients and state, and goes by element."""
_MODULES = frozenset(f"torch.optim.{name}" for name in _FUNCTIONS)


@contextmanager
def stepping_with_local_shards() -> Iterator[None]:
    """Have torch's optimizers, and those of scripts that call their functions, compute with local shards."""
    with ExitStack() as stack:
        for name in _FUNCTIONS:
            module = importlib.import_module(f"torch.optim.{name}")
            stack.enter_context(replaced(module, name, _with_local_shards))
        yield


@cache
def step_with_local_shards() -> None:
    """Do so until the process ends."""
    _until_the_end.enter_context(stepping_with_local_shards())


_until_the_end = ExitStack()


def _with_local_shards(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def compute(*args: Any, **kwargs: Any) -> None:
        local = None if torch.compiler.is_compiling() else _local_lists(args, kwargs)
        if local is None:
            function(*args, **kwargs)
            return
        function(*local, **kwargs)
        changed: list[Any] = list(args[0])
        for given, now in zip(args[2:], local[2:], strict=True):
            if isinstance(given, list):
                _put_new(given, now, args[0])
                changed += given
        note_changes([value for value in changed if isinstance(value, DTensor)])

    return compute


def _local_lists(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return arguments with local tensors in their lists; None where not all is divided as the parameters are."""
    if not args or not isinstance(args[0], list) or not _are_shards(args[0]) or kwargs.get("differentiable"):
        return None
    for value in kwargs.values():
        if isinstance(value, DTensor):
            return None
    found: list[Any] = []
    for given in args:
        local = _local(given, args[0]) if isinstance(given, list) else given
        if local is None and given is not None:
            return None
        found.append(local)
    return found


def _are_shards(params: list[Any]) -> bool:
    """Return whether all are shards, by few calls of functions: steps are often many and small."""
    for param in params:
        if not isinstance(param, DTensor):
            return False
        for placement in placements_of(param):
            if placement.is_partial():
                return False
    return True


def _local(given: list[Any], params: list[Any]) -> list[Any] | None:
    """Return the local tensors of a list that has one entry for each parameter, or is empty.

    None where one of them is divided otherwise. Counts of steps are plain tensors of one number. A momentum is
    None before the first step.
    """
    local: list[Any] = []
    for value, param in zip(given, params, strict=False):
        if isinstance(value, DTensor):
            if placements_of(value) != placements_of(param):
                return None
            local.append(local_tensor(value))
        elif isinstance(value, torch.Tensor) and value.dim():
            return None
        else:
            local.append(value)
    return local


def _put_new(given: list[Any], local: list[Any], params: list[Any]) -> None:
    """Put what a function has made in the place of None where its optimizer looks for it, as shards."""
    for place, (value, made, param) in enumerate(zip(given, local, params, strict=False)):
        if value is None and made is not None:
            given[place] = with_local_tensor(param, made)
