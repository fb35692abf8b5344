"""Backward passes of sharded models: gradients that torch would lose are computed, or refused at their line."""

import sys
from collections.abc import Iterator, ValuesView
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from fsdplaunch.runtime.auto.batch.progress import SameRows
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.calls import all_divided
from fsdplaunch.runtime.auto.model.double_backward import differentiable_grad, refuse_parameters
from fsdplaunch.runtime.auto.model.parameter_gradients import gradients_by_backward, sharded_parameters
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.tensors import is_in_backward, is_of_transform
from fsdplaunch.runtime.torch_internals.wrappers import compiles_backward


@contextmanager
def watching_backward(hook_context: HookContext) -> Iterator[None]:
    """Rules 1 and 2: gradients by parameters are shards; what a divided pass computes again is drawn as in it."""
    watch = _Watch(hook_context)
    with replaced(torch.autograd, "backward", watch.backward), replaced(torch.autograd, "grad", watch.grad):
        yield


_BACKWARD = "backward(create_graph=True)"
_GRAD = "torch.autograd.grad with create_graph=True, or together with other inputs,"


class _Watch:
    """The backward passes of one worker."""

    def __init__(self, hook_context: HookContext) -> None:
        self.hook_context = hook_context
        different = hook_context.data.size == hook_context.size > 1 and not hook_context.keeps_batch
        self.rows = SameRows(hook_context.batches, hook_context.config, compares=different)

    def _acts(self) -> bool:
        return bool(self.hook_context.ownership.ours and self.hook_context.models)

    def _begin(self) -> None:
        context = self.hook_context
        self.rows.check(context.device, ranked=context.ownership.ranked)
        context.batches.leave()

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
            if self._acts():
                if create_graph:
                    raise refuse_parameters(_BACKWARD)
                self._begin()
            with ExitStack() as stack:
                for divided in all_divided():
                    stack.enter_context(divided.recomputing())
                return original(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)

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
            self._begin()
            return gradients_by_backward(outputs, params, given, retain_graph, list(self.hook_context.models))
        if create_graph and all(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
            return differentiable_grad(grad, outputs, inputs, given)
        return None


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
