"""Let hooks of `register_save_state_pre_hook` take away states that accelerate does not give them for FSDP.

Such a hook saves each model in a way of its own and takes its state from a list, so that it is not saved again:
`weights.pop()`. What FSDP has sharded accelerate saves itself, before, and the list is empty.
"""

import functools
from collections.abc import Callable
from typing import Any

from fsdplaunch.runtime.compat.import_hook import once_imported


def let_save_hooks_take_states() -> None:
    """Adapt accelerate, if and when the script imports it."""
    once_imported("accelerate.accelerator", _adapt)


class _SavedAsShards(list[Any]):
    """No states, of which one may be taken all the same."""

    def pop(self, *args: Any) -> Any:
        """Return None where nothing is left."""
        return super().pop(*args) if self else None


def _adapt(module: Any) -> None:
    kind = module.Accelerator
    register = kind.register_save_state_pre_hook

    @functools.wraps(register)
    def register_save_state_pre_hook(self: Any, hook: Callable[..., Any]) -> Any:
        return register(self, _given_what_may_be_taken(hook))

    kind.register_save_state_pre_hook = register_save_state_pre_hook


def _given_what_may_be_taken(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def save_hook(models: Any, weights: list[Any], output_dir: Any) -> Any:
        return hook(models, weights or _SavedAsShards(), output_dir)

    return save_hook
