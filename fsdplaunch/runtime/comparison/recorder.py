"""Record what a script computes in each optimizer step, without a change of the script.

The same recorder runs in a plain process and in every worker. Nothing here is collective: each process writes down
its own part, and the launcher puts the parts together.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.comparison.named_models import Known, NamedModels, squared_gradient
from fsdplaunch.runtime.data.random_state import random_digest
from fsdplaunch.runtime.inspection.accessors import full_tensor
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.modules import CALL_METHOD
from fsdplaunch.runtime.torch_internals.tensors import is_function_transforms


@dataclass(slots=True)
class Step:
    """What went before one optimizer step.

    Attributes:
        losses: The values that backward was called on; each rank's by its part of what a mean is over.
        line: Of the script, where backward was called last.
        rows: Rows of the first batch, by the first tensor that a module was given.
        content: The sum of that tensor.
        draws: Whether random numbers were drawn between forward and backward.
        random: A digest of the random generators at the backward: equal where a process has drawn the same so far.
        gradients: For each parameter the sum of its squared gradient here, and whether others have more of it.
    """

    losses: list[float] = field(default_factory=list)
    line: str = ""
    rows: int | None = None
    content: float = 0.0
    draws: bool = False
    random: str = ""
    gradients: dict[str, tuple[float, bool]] = field(default_factory=dict)


class Recorder:
    """One process's record.

    Attributes:
        steps: In their order, over all optimizers.
        start: For each parameter the sum of its squares here before the first step, and whether others have more.
        layers: Those that computed something else with another batch, at the first step.
        models: The trained models.
        count: What to call after a step that no optimizer of torch's makes.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.start: dict[str, tuple[float, bool]] = {}
        self.layers: list[str] = []
        self.models = NamedModels()
        self._now = Step()
        self._state: torch.Tensor | None = None
        self._depth = 0
        self._built = False
        self.count: Callable[[Any], None] = lambda _: None

    def install(self) -> None:
        """Begin to record, until the process ends."""
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._step)
        torch.autograd.backward = self._recorded(torch.autograd.backward)
        Optimizer.__init__ = self._noted(Optimizer.__init__)  # type: ignore[method-assign]
        torch.compile = _breaking_at_hooks(torch.compile)

    def facts(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return {
            "steps": [{name: getattr(step, name) for name in Step.__slots__} for step in self.steps],
            "start": self.start,
            "layers": self.layers,
            "told": messages.unequal,
        }

    def _forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._now.rows is not None or not torch.is_grad_enabled() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return
        if next(module.parameters(), None) is None:  # a transform of the dataset, which is given one row
            return
        batch = next((arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim()), None)
        if batch is None or batch.is_meta or is_function_transforms(batch):  # a count of operations has no values
            return
        batch = full_tensor(batch.detach())
        self._now.rows, self._now.content = batch.shape[0], batch.double().sum().item()
        self._state = torch.get_rng_state()

    def _recorded(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            loss = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
            counted = not self._depth and self._loss(loss)
            self._depth += 1
            try:
                done = backward(tensors, *args, **kwargs)
            finally:
                self._depth -= 1
            if counted and not self._depth and not self._built:
                self._end_step(self.models.parameters_with_gradients())
                self.count(self)
            return done

        return recorded

    def _noted(self, build: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(build)
        def noted(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._built = True
            build(optimizer, *args, **kwargs)

        return noted

    def _loss(self, loss: Any) -> bool:
        """Record a loss; return whether it is one."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_meta:
            return False
        if self._state is not None:
            self._now.draws = self._now.draws or not torch.equal(self._state, torch.get_rng_state())
        self._now.random = random_digest()
        self._now.losses.append(full_tensor(loss.detach()).float().item())
        self._now.line = script_line()
        return True

    def _step(self, optimizer: Optimizer, *_: Any) -> None:
        self._end_step(self.models.parameters_of(optimizer))

    def _end_step(self, known: list[Known]) -> None:
        if not self.start:
            self.start, self.layers = self.models.squares(), self.models.layers()
        for name, param, shared in known:
            if param.grad is not None:
                self._now.gradients[name] = squared_gradient(param.grad, param, shared)
        self.steps.append(self._now)
        self._now, self._state = Step(), None


def _breaking_at_hooks(compile_: Any) -> Any:
    """Return `torch.compile` without its `fullgraph` for `model.compile()`, whose graph breaks at `_forward`."""

    def compile_in_parts(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if getattr(model, "__name__", "") == CALL_METHOD:
            kwargs.pop("fullgraph", None)
        return compile_(model, *args, **kwargs)

    return compile_in_parts
