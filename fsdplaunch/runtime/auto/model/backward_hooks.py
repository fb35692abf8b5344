"""Look at each backward pass of a plain script before it runs: how the loss is reduced, and what it is for."""

import sys
from collections.abc import Iterator, ValuesView
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.numbered_rows import tell_numbered_rows
from fsdplaunch.runtime.auto.data.row_statistics import tell_noted
from fsdplaunch.runtime.auto.data.same_rows import SameRows
from fsdplaunch.runtime.auto.losses.scale import LossScale
from fsdplaunch.runtime.auto.losses.whole_value import WholeValue
from fsdplaunch.runtime.auto.model.double_backward import differentiable_grad, refuse_parameters
from fsdplaunch.runtime.auto.model.forward_hooks import check_not_gathered
from fsdplaunch.runtime.auto.model.parameter_gradients import gradients_by_backward, sharded_parameters
from fsdplaunch.runtime.auto.rng.random_alignment import align_random_states
from fsdplaunch.runtime.auto.rng.single_draws import tell_single
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.graphs.graph_nodes import is_in_backward
from fsdplaunch.runtime.torch_internals.tensors import is_of_transform
from fsdplaunch.runtime.torch_internals.wrappers import compiles_backward


@contextmanager
def watching_backward(hook_context: HookContext) -> Iterator[None]:
    """Give losses the gradients of one process, and refuse or tell what cannot have them."""
    watch = _Watch(hook_context)
    noting = register_optimizer_step_post_hook(watch.scale.rates.note) if hook_context.keeps_batch else None
    try:
        with replaced(torch.autograd, "backward", watch.backward), replaced(torch.autograd, "grad", watch.grad):
            yield
    finally:
        if noting is not None:
            noting.remove()


_BACKWARD = "backward(create_graph=True)"
_GRAD = "torch.autograd.grad with create_graph=True, or together with other inputs,"


class _Watch:
    """The backward passes of one worker."""

    def __init__(self, hook_context: HookContext) -> None:
        self.hook_context = hook_context
        self.scale, self.rows = LossScale(hook_context), SameRows(hook_context)

    def _acts(self) -> bool:
        return bool(self.hook_context.ownership.ours and self.hook_context.models)

    def _prepare(self, losses: list[torch.Tensor]) -> list[WholeValue]:
        """Check and scale what gradients of the parameters are computed from; return what the losses are."""
        check_not_gathered()
        whole: list[WholeValue] = []
        if self.hook_context.size > 1:
            self.rows.check()
            if self.hook_context.keeps_batch:
                tell_single(self.hook_context)
                tell_noted(self.hook_context)
                tell_numbered_rows(self.hook_context)
                whole = self.scale.apply(losses)
                self.hook_context.recorder.note_backward()
                align_random_states(self.hook_context)
        self.hook_context.batches.leave()
        return whole

    def backward(self, original: Any) -> Any:
        """Make `torch.autograd.backward`, which `Tensor.backward` calls."""

        @wraps(original)
        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            whole: list[WholeValue] = []
            if self._acts():
                if create_graph:
                    raise refuse_parameters(_BACKWARD)
                whole = self._prepare(_listed(tensors))
            done = original(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)
            return _put(whole, done, retain_graph) if whole else done

        return backward

    def grad(self, original: Any) -> Any:
        """Make `torch.autograd.grad`."""

        @wraps(original)
        def grad(
            outputs: Any,
            inputs: Any,
            grad_outputs: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if isinstance(inputs, Iterator | ValuesView):  # model.parameters() is read once
                inputs = tuple(inputs)
            if self._acts() and not _compiles() and not is_of_transform(outputs):
                found = self._own_grad(
                    original, _listed(outputs), _listed(inputs), grad_outputs, retain_graph, create_graph
                )
                if found is not None:
                    return found
            return original(outputs, inputs, grad_outputs, retain_graph, create_graph, *args, **kwargs)

        return grad

    def _own_grad(
        self, grad: Any, outputs: Any, inputs: Any, given: Any, retain_graph: bool | None, create_graph: bool
    ) -> Any:
        """Return the gradients that torch would lose with sharded models; None for those it computes."""
        params = sharded_parameters(inputs, list(self.hook_context.models))
        if any(param is not None for param in params) and not _is_recomputed(params, inputs, create_graph):
            if create_graph or not all(param is not None for param in params):
                raise refuse_parameters(_GRAD)
            whole = self._prepare(outputs)
            models = list(self.hook_context.models)
            return _put(whole, gradients_by_backward(outputs, params, given, retain_graph, models), retain_graph)
        if create_graph and all(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
            return differentiable_grad(grad, outputs, inputs, given)
        return None


def _put(whole: list[WholeValue], done: Any, retain_graph: bool | None) -> Any:
    """Give losses their values, unless another backward may need them as they were computed; return `done`."""
    for each in () if retain_graph else whole:
        each.put()
    return done


def _is_recomputed(params: list[Any], inputs: list[Any], create_graph: bool) -> bool:
    """Return whether a function's own backward differentiates what it has computed again from gathered parameters.

    Checkpoints written by hand do so. What it returns goes on to the gathered parameters, as that of any layer.
    """
    gathered = all(param is None or param is not value for param, value in zip(params, inputs, strict=True))
    return gathered and not create_graph and is_in_backward()


def _compiles() -> bool:
    """Return whether the compiler makes a backward graph, two frames up: it sees parameters of split layers."""
    return compiles_backward(str(sys._getframe(2).f_globals.get("__name__", "")))


def _listed(tensors: Any) -> list[Any]:
    """Return what torch is given as one or as several, of which an edge of a graph is one."""
    return list(tensors) if isinstance(tensors, list | tuple) and not hasattr(tensors, "node") else [tensors]
