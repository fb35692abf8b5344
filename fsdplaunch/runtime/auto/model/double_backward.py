"""Gradients that torch would lose around FSDP2's hooks: differentiated again, or asked for by parameters.

FSDP2 frees parameters when a backward pass has gone by, and the second pass through its graph finds none. The
model's pass is computed again with full parameters that are gathered by operations that have gradients themselves.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.full_values import call_unsharded
from fsdplaunch.runtime.inspection.units import is_unit, reshard
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.random_numbers import random_states, set_random_states
from fsdplaunch.runtime.torch_internals.fsdp import gathered_parameters
from fsdplaunch.runtime.torch_internals.tensors import is_in_backward, tree_leaves

_KEY = "fsdplaunch_pass"
_GRAD = "torch.autograd.grad with create_graph=True, or together with other inputs,"
_MOST_NODES = 100_000


class ModelPass:
    """One forward pass of a sharded model, as it begins; kept by the graph of what it returned."""

    def __init__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.model = weakref.ref(model)
        self.args, self.kwargs = args, kwargs
        self.states = random_states()
        # A pass may change them, as spectral norm does to go on from there.
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def keep(self, output: Any) -> None:
        """Let the graph of the model's output remember the pass; it lives as long as the graph does."""
        for position, value in enumerate(tree_leaves(output)):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                edge = get_gradient_edge(value)
                metadata: Any = edge.node.metadata  # what is there lives as long as the node
                metadata.setdefault(_KEY, []).append((self, edge, position))


def _passes_below(roots: Sequence[Any], inputs: Sequence[Any]) -> Iterator[tuple[ModelPass, GradientEdge, int]]:
    """Yield what models returned below these nodes, and check that nothing else leads to the inputs."""
    wanted = {get_gradient_edge(value).node for value in inputs}
    waiting, seen, found, passed = [node for node in roots if node is not None], set[Any](), [], False
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        passed = passed or node in wanted
        passes = node.metadata.get(_KEY)
        if passes:
            found += passes
            continue
        waiting += [below for below, _ in node.next_functions if below is not None]
    if found and (passed or any(_reaches_another(made, wanted) for made, _, _ in found)):
        msg = (
            f"{script_line()}: a gradient with create_graph=True goes through more than one pass of sharded models"
        )
        raise ShardingError(msg, hint=_REMEDY)
    yield from found


def _reaches_another(made: ModelPass, wanted: set[Any]) -> bool:
    """Return whether what a pass was given came from another model's pass."""
    waiting = [v.grad_fn for v in tree_leaves((made.args, made.kwargs)) if isinstance(v, torch.Tensor)]
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_NODES:
        node: Any = waiting.pop()
        if node is None or node in seen or node in wanted:
            continue
        seen.add(node)
        if _KEY in node.metadata:
            return True
        waiting += [below for below, _ in node.next_functions]
    return False


_REMEDY = (
    "take the gradient of the model's outputs with respect to its inputs; or run this script in one process "
    "(--num-processes 1 --shard off)"
)


def refuse_create_graph(what: str = "backward(create_graph=True)") -> ShardingError:
    """Return the error for second derivatives by parameters."""
    msg = f"{script_line()}: {what} for the parameters of a sharded model would lose gradients"
    return ShardingError(msg, hint="run this script in one process: --num-processes 1 --shard off")


def _recomputed(made: ModelPass) -> list[Any]:
    """Compute a pass again, with the numbers it drew, from parameters that have gradients of any order."""
    model: Any = made.model()
    reshard(model)
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: made.buffers.get(name, buffer).clone() for name, buffer in model.named_buffers()}
    call, now = inspect.unwrap(torch.func.functional_call), random_states()
    set_random_states(made.states)
    try:
        return list(tree_leaves(call_unsharded(call, model, params | buffers, params, made.args, made.kwargs)))
    finally:
        set_random_states(now)


def own_gradients(
    grad: Any,
    outputs: Any,
    inputs: Any,
    given: Any,
    retain_graph: bool | None,
    create_graph: bool,
    *,
    models: Sequence[nn.Module],
    begin: Callable[[], None],
) -> Any:
    """Return the gradients that torch would lose with sharded models; None for those it computes."""
    outputs, inputs = _listed(outputs), _listed(inputs)
    units = [module for model in models for module in model.modules() if is_unit(module)]
    gathered_now = {id(full): shard for unit in units for full, shard in gathered_parameters(unit)}
    params = [value if isinstance(value, DTensor) else gathered_now.get(id(value)) for value in inputs]
    # A function's own backward may differentiate what it has computed again from gathered parameters, as a
    # checkpoint written by hand does. What it returns goes on to these, as that of any layer.
    in_function = is_in_backward() and not create_graph
    recomputed = in_function and all(each is not value for each, value in zip(params, inputs, strict=True))
    if any(param is not None for param in params) and not recomputed:
        if create_graph or not all(param is not None for param in params):
            raise refuse_create_graph(_GRAD)
        begin()
        # The gradients of sharded parameters by a backward pass, which leaves those that were there.
        every: dict[int, Any] = {id(param): param for model in models for param in model.parameters()}
        every |= {id(param): param for param in params}
        before = [(each, each.grad) for each in every.values()]
        for each, _ in before:
            each.grad = None
        try:
            inspect.unwrap(torch.autograd.backward)(outputs, given, retain_graph)
            return tuple(every[id(param)].grad for param in params)
        finally:
            for each, gradient in before:
                each.grad = gradient
    if create_graph and all(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
        kept = list(_passes_below([output.grad_fn for output in outputs], inputs))
        if not kept:
            return None
        how = {"create_graph": True, "retain_graph": True, "allow_unused": True}
        above = grad(outputs, [edge for _, edge, _ in kept], given, **how)
        total: list[Any] = [None] * len(inputs)
        passes: dict[int, tuple[ModelPass, list[tuple[int, Any]]]] = {}
        for (made, _, position), gradient in zip(kept, above, strict=True):
            passes.setdefault(id(made), (made, []))[1].append((position, gradient))
        for made, share in passes.values():
            values = _recomputed(made)
            chosen = [(values[position], gradient) for position, gradient in share if gradient is not None]
            parts = grad([value for value, _ in chosen], inputs, [gradient for _, gradient in chosen], **how)
            pairs = zip(total, parts, strict=True)
            total = [other if one is None else one if other is None else one + other for one, other in pairs]
        return tuple(total)
    return None


def _listed(tensors: Any) -> list[Any]:
    """Return what torch is given as one or as several, of which an edge of a graph is one."""
    return list(tensors) if isinstance(tensors, list | tuple) and not hasattr(tensors, "node") else [tensors]
