"""Leave out hooks by which DistributedDataParallel would exchange gradients: FSDP averages them.

Those that make the exchange cheaper and mean to compute the same are named; any other is an error.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.modules import BUILTIN_HOOK

_LOSSLESS = (
    "allreduce_hook",
    "fp16_compress_hook",
    "bf16_compress_hook",
    "powerSGD_hook",
    "batched_powerSGD_hook",
)
"""Torch's hooks for communication: they make it cheaper, and mean to compute the same."""
_WRAPPING = ("fp16_compress_wrapper_hook", "bf16_compress_wrapper_hook")
"""What its wrappers of such a hook are called."""


@contextmanager
def leaving_out_comm_hooks() -> Iterator[None]:
    """Exchange the methods by which a script registers such hooks, for wrappers of sharded models."""
    with (
        replaced(DistributedDataParallel, "register_comm_hook", _register_comm_hook),
        replaced(DistributedDataParallel, BUILTIN_HOOK, _register_builtin_hook),
    ):
        yield


def _only_compresses(hook: Any) -> bool:
    """Return whether a hook for communication is torch's and means to compute the same; also in a wrapper."""
    name, torchs = getattr(hook, "__name__", ""), str(getattr(hook, "__module__", "")).startswith("torch.")
    if torchs and name in _WRAPPING:
        return _only_compresses(inspect.getclosurevars(hook).nonlocals.get("hook"))
    return torchs and name in _LOSSLESS


def _register_comm_hook(original: Any) -> Any:
    def register_comm_hook(self: Any, state: Any, hook: Any) -> None:
        if "fsdplaunch_forward" not in self.__dict__:
            original(self, state, hook)
            return
        name = getattr(hook, "__name__", type(hook).__name__)
        if not _only_compresses(hook):
            msg = f"{script_line()} registers {name}, which changes how gradients are averaged"
            hint = "leave it out; precision.reduce sets the dtype that gradients are averaged in"
            raise ShardingError(msg, hint=hint)
        _tell_of_hook(name)

    return register_comm_hook


def _register_builtin_hook(original: Any) -> Any:
    def register_builtin_hook(self: Any, kind: Any) -> None:
        if "fsdplaunch_forward" in self.__dict__:
            _tell_of_hook(kind.name)
        else:
            original(self, kind)

    return register_builtin_hook


def _tell_of_hook(name: str) -> None:
    messages.say(
        f"{script_line()}: {name} has no effect: FSDP averages the gradients, in the dtype of precision.reduce"
    )
