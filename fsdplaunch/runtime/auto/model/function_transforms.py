"""Let torch.func's transforms (`vjp`, `jacrev`, `vmap`, `grad`) differentiate the passes of sharded models.

Needed because FSDP2's hooks exchange parameters around each pass, of which a transform knows nothing: it ended in
errors of torch's own. The models compute with full parameters meanwhile, which were gathered before by operations
that have gradients.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.losses.row_mixing import mark_outputs
from fsdplaunch.runtime.auto.model.double_backward import full_parameters, refuse_parameters
from fsdplaunch.runtime.auto.state.unsharded_copy import as_before
from fsdplaunch.runtime.inspection.units import reshard
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import is_in_pass, root_mixed_precision
from fsdplaunch.runtime.torch_internals.graphs.node_kinds import mark_rows
from fsdplaunch.runtime.torch_internals.modules import with_parameters
from fsdplaunch.runtime.torch_internals.tensors import tree_leaves

_MAKING = ("grad", "grad_and_value", "jacrev", "jacfwd", "hessian", "vmap")
"""Transforms that return a function; `vjp` computes when it is called, and `jvp` goes through the hooks well."""


@contextmanager
def transforming_functions(hook_context: HookContext) -> Iterator[None]:
    """Hook the transforms, where they begin outside of any other and of a model's pass."""
    transforms = _Transforms(hook_context)
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.func, "vjp", functools.partial(transforms.around, name="vjp")))
        stack.enter_context(replaced(torch.func, "jvp", transforms.marking))
        for owner, name in [*((torch.func, name) for name in _MAKING), (torch, "vmap")]:
            stack.enter_context(replaced(owner, name, functools.partial(transforms.making, name=name)))
        yield


class _Transforms:
    """The transforms of one worker."""

    def __init__(self, hook_context: HookContext) -> None:
        self.hook_context = hook_context
        self.depth = 0

    def making(self, original: Any, name: str) -> Callable[..., Any]:
        """Make a transform that returns a function."""

        @functools.wraps(original)
        def transform(*args: Any, **kwargs: Any) -> Any:
            return self.around(original(*args, **kwargs), name)

        return transform

    def around(self, original: Any, name: str) -> Callable[..., Any]:
        """Make a function that computes with full parameters."""

        @functools.wraps(original)
        def compute(*args: Any, **kwargs: Any) -> Any:
            models = self._models()
            if not models:
                return original(*args, **kwargs)
            given = tree_leaves((args, kwargs))
            if any(isinstance(value, DTensor) for value in given):
                msg = f"torch.func.{name}"
                raise refuse_parameters(msg)
            self.hook_context.batches.enter(given)
            self.depth += 1
            try:
                with _computing_with_full_parameters(models, self.hook_context.full):
                    result = original(*args, **kwargs)
            finally:
                self.depth -= 1
            self._mark(result)
            return result

        return compute

    def marking(self, original: Any) -> Callable[..., Any]:
        """Make a transform that computes through the hooks."""

        @functools.wraps(original)
        def compute(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._models():
                self._mark(result)
            return result

        return compute

    def _mark(self, result: Any) -> None:
        """Take what a transform returns for outputs of models, with rows of the batch in them where it has any."""
        mark_outputs(result)
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and self.hook_context.batches.may_have_rows(value):
                mark_rows(value)

    def _models(self) -> list[nn.Module]:
        """Return the sharded models that may be called; none inside of a pass, or of another transform."""
        context = self.hook_context
        if self.depth or not context.ownership.ours or torch.compiler.is_compiling():
            return []
        models = list(context.models)
        return [] if any(is_in_pass(model) for model in models) else models


@contextmanager
def _computing_with_full_parameters(models: list[nn.Module], known: dict[int, torch.Tensor]) -> Iterator[None]:
    """Show models as they were before they were sharded, with full parameters. Collective.

    Args:
        models: Sharded.
        known: Gets the full parameters by the identity of the shards, for as long as this lasts.
    """
    with ExitStack() as stack:
        stack.callback(known.clear)
        for model in models:
            reshard(model)
            dtype = root_mixed_precision(model).param_dtype
            shards = dict(model.named_parameters(remove_duplicate=False))
            params = full_parameters(shards, dtype)
            known.update({id(shard): params[name] for name, shard in shards.items()})
            for module in list(model.modules()):
                stack.enter_context(as_before(module))
            stack.enter_context(with_parameters(model, params))
        yield
