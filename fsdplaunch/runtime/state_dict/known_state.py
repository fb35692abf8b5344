"""Let code that writes a sharded model in a way of its own find what was gathered of it already.

Such code asks the model, or a module inside of it, for its state, on the one rank that writes: to gather there
would wait for the others.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from fsdplaunch.runtime.patch import own_attribute
from fsdplaunch.runtime.state_dict.full_state import State, below

_known: list[tuple[nn.Module, Mapping[str, Any]]] = []
"""Models and what was gathered of them, the last first asked."""


@contextmanager
def knowing_state(model: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Have `state_dict()` of a model and of each module inside be what was gathered, as long as the context lasts.

    Args:
        model: Sharded, by either FSDP version.
        state: Full tensors by the names that the model had before sharding.
    """
    _known.append((model, state))
    try:
        with ExitStack() as stack:
            for module in model.modules():
                answer = functools.partial(_state_dict, module)
                stack.enter_context(own_attribute(module, "state_dict", answer))
            yield
    finally:
        _known.pop()


def known_state(model: nn.Module) -> State | None:
    """Return what was gathered of a model, by its own names; None where nothing was."""
    for owner, state in reversed(_known):
        if any(module is model for module in owner.modules()):
            return below(state, model, owner)
    return None


def _state_dict(module: nn.Module, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
    state = known_state(module)
    if state is None or args or kwargs.get("destination") is not None:  # asked for by a module around it
        return type(module).state_dict(module, *args, prefix=prefix, **kwargs)
    return {prefix + name: value for name, value in state.items()}
