"""`torch.jit.script` compiles what it does in one process; what its programs draw for the rows of a rank is told.

Needed because its programs run torch's operators without the hooks of torch's functions.
"""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.script_line import script_line

_UNEQUAL = re.compile(r"aten::(bernoulli|multinomial|poisson|batch_norm)\(")
"""Operators that compute for this rank's rows alone. Others come down to operators that are hooked themselves."""
_HOOKS = 2
"""Frames between the caller and torch: `script` below, and what gives exports full models."""


def telling_unequal(hook_context: HookContext, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for `torch.jit.script`."""

    @wraps(original)
    def script(given: Any, *args: Any, **kwargs: Any) -> Any:
        if inspect.isclass(given):
            kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + _HOOKS  # whose names the class may use
        scripted = original(given, *args, **kwargs)
        if "_rcb" not in kwargs:  # not a function that torch compiles for another
            _tell_unequal(scripted, hook_context)
        return scripted

    return script


def _tell_unequal(scripted: Any, hook_context: HookContext) -> None:
    """Print what a program computes for the rows of one rank, where the global batch is kept."""
    if not hook_context.keeps_batch or hook_context.data.size == 1:
        return
    for name in sorted(set(_UNEQUAL.findall(str(getattr(scripted, "inlined_graph", ""))))):
        line = f"{script_line()}: compiled by torch.jit.script, {name} computes for each rank's own rows"
        if line not in hook_context.printed:
            hook_context.printed.add(line)
            messages.say_unequal(f"{line}, which is not what one process computes")
