"""Find out at the first optimizer step whether what is trained is sharded, and by whom.

At that moment all is known, and nothing is lost yet: replicas that train on, each by itself, are ended here. A
script that updates its parameters itself is found at its second backward pass.
"""

import functools
import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from fsdplaunch.runtime.library_watch import built_library
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.sharding_watch import may_stay_unsharded, never_sharded, sharded_by
from fsdplaunch.runtime.step_hooks import before_first_step


def check_at_first_step(name: str) -> None:
    """Check at the first step of any optimizer, and never again.

    Args:
        name: The script's, for the error.
    """

    def check() -> None:
        if not may_stay_unsharded():
            raise never_sharded(name, f"; found at its first optimizer step, {script_line()}")
        describe_others()

    before_first_step(optimizers, check)
    _Updates(name).watch()


class _Updates:
    """Parameters that change between backward passes, without an optimizer and before anything was sharded."""

    MOST_PASSES = 10
    """After which nothing is looked at any more: scripts compute gradients for other ends as well."""
    MOST_NODES = 5000

    def __init__(self, name: str) -> None:
        self.name = name
        self.left = self.MOST_PASSES
        self.sums: dict[weakref.ref[nn.Parameter], float] = {}

    def watch(self) -> None:
        """Look at each of the first backward passes."""
        backward = torch.autograd.backward
        before_first_step(optimizers, self._end)

        @functools.wraps(backward)
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.left:
                self._look(tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None))
            return backward(tensors, *args, **kwargs)

        torch.autograd.backward = watched

    def _end(self) -> None:
        self.left = 0

    def _look(self, loss: Any) -> None:
        if may_stay_unsharded():
            self._end()
            return
        self.left -= 1
        param = _parameter_below(loss, self.MOST_NODES)
        if param is None:
            return
        now = float(param.detach().double().sum().item())
        if self.sums.setdefault(weakref.ref(param), now) != now:
            where = f"; found at its second backward pass, {script_line()}"
            also = "or move it to its device by model.to(device), where it is sharded"
            raise never_sharded(self.name, where, also)


def _parameter_below(loss: Any, most: int) -> nn.Parameter | None:
    """Return one of the parameters that a loss has a gradient for."""
    waiting, seen = [getattr(loss, "grad_fn", None)], set[Any]()
    while waiting and len(seen) < most:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            return leaf
        waiting += [below for below, _ in node.next_functions]
    return None


def describe_others() -> None:
    """Print how the models are sharded that something else than this package has sharded."""
    from fsdplaunch.runtime.inspection.units import is_sharded
    from fsdplaunch.runtime.sharding.registry import registered  # only now: a worker must start fast

    models = [thing for thing in gc.get_objects() if _is_module(thing) and is_sharded(thing)]
    inside = {id(part) for model in models for child in model.children() for part in child.modules()}
    for model in models:
        if id(model) not in inside and registered(model) is None:
            _describe(model)


def _is_module(thing: Any) -> bool:
    return issubclass(type(thing), nn.Module)  # isinstance would ask proxies, which import what they stand for


def _describe(model: nn.Module) -> None:
    from fsdplaunch.runtime.inspection.announce import announce
    from fsdplaunch.runtime.inspection.describe import describe_seen
    from fsdplaunch.runtime.inspection.units import reshard

    reshard(model)  # an evaluation may have left parameters gathered, which tell nothing
    library = built_library()
    announce(describe_seen(model), f"by {sharded_by() if library is None else library.name}")
