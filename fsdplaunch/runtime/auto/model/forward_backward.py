"""The passes of a sharded model, forward and backward.

A pass is the outermost call of the model, or of a part of it that the script calls. FSDP2 gathers parameters
around the `forward` of a unit. A part that is not a unit (`model.encoder(x)`, a layer that a method of the model
calls) computes as if the model's forward had called it: in a pass of the unit around it.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, ValuesView
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto import HookContext
from fsdplaunch.runtime.auto.model.parameters import GatheredView, late_parameter
from fsdplaunch.runtime.auto.rank0.passes import Passes
from fsdplaunch.runtime.inspection import named_parameters, parameters_of
from fsdplaunch.runtime.inspection.units import full_tensor, is_unit, original_class
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.torch_internals.fsdp import (
    begin_unit_pass,
    end_unit_pass,
    is_in_pass,
    pass_look,
    root_mixed_precision,
    take_for_outermost,
)
from fsdplaunch.runtime.torch_internals.modules import BatchNorm, makes_graph, put_tensor, untraced
from fsdplaunch.runtime.torch_internals.tensors import (
    apart_from_parameters,
    is_in_backward,
    is_in_transform,
    is_of_transform,
    return_no_parameters,
    tree_leaves,
    tree_map,
)

if TYPE_CHECKING:
    from fsdplaunch.runtime.auto.batch.divided_pass import DividedPasses
    from fsdplaunch.runtime.auto.model.double_backward import ModelPass


class Calls:
    """The calls of one sharded model; `divided` divides them by rows, unless each rank has rows of its own."""

    def __init__(
        self,
        model: nn.Module,
        line: str,
        hook_context: HookContext,
        passes: Passes,
        divided: "DividedPasses | None",
    ) -> None:
        self.model = weakref.ref(model)
        self.line, self.hook_context = line, hook_context
        self.begin_pass = untraced(passes.begin)
        self.divided = divided
        self.known = {id(param) for _, param in named_parameters(model)}
        self.checked = self.trained = False
        self.outermost: list[nn.Module] = []
        self.alone: Passes | None = None
        self.twice: ModelPass | None = None
        self.view = GatheredView(model, lambda: bool(hook_context.batches.backwards or hook_context.optimizers))
        _calls[model] = self
        self.begin = untraced(self._begin)
        enter: Any = self._enter
        leave: Any = self._leave
        if divided is not None:  # also where a compiler has traced the model
            enter, leave = _not_compiled(enter), _not_compiled(leave)
        for part in (model, *_parts(model)):
            first = self._enter_model if part is model and divided is None else enter
            # Before torch's own, which exchanges parameters; and after it.
            part.register_forward_pre_hook(first, prepend=True, with_kwargs=True)
            part.register_forward_hook(leave, always_call=True, with_kwargs=True)
        for unit in model.modules():
            if is_unit(unit):
                _call_for_forward(unit)
        # Let BatchNorm compute with bf16 parameters beside fp32 statistics, of which CPUs have no function.
        low = is_unit(model) and root_mixed_precision(model).param_dtype not in (None, torch.float32)
        for module in model.modules() if low else ():
            if isinstance(module, BatchNorm) and "forward" not in module.__dict__:
                module.__dict__["forward"] = _normalising(weakref.ref(module))
        prepared = registered(model)
        for name in prepared.methods if prepared is not None else ():
            model.__dict__.pop(name, None)  # what such a method calls is a pass, so nothing is gathered around it

    def check(self) -> None:
        """Refuse a model that has other parameters than those that were sharded."""
        model: Any = self.model()
        for name, param in named_parameters(model):
            if id(param) not in self.known:
                raise late_parameter(model, name, self.line)

    def _enter_model(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            self.begin(model)
            return None
        return self._enter(model, args, kwargs)

    def _enter(self, part: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        if self.outermost or is_in_backward():
            if self.outermost and part is self.outermost[0]:
                self.outermost.append(part)
            return None
        model: Any = self.model()
        measuring = self.divided is not None and self.divided.measuring
        if not measuring:
            self._begin(model)
        if self.alone is not None:
            self.outermost.append(part)
            return self.alone.inputs(model, args, kwargs)
        self.view.enter(model)
        args, kwargs = tree_map(  # shards without gradients are a state that was made like a parameter
            lambda value: value if not isinstance(value, DTensor) or value.requires_grad else full_tensor(value),
            (args, kwargs),
        )
        if not measuring:
            self._note(model, part, args, kwargs)
        if self.divided is not None:
            args, kwargs = self.divided.begin(part, args, kwargs)
        self.outermost.append(part)  # not before: passes that are measured are passes of their own
        if part is not model and not is_unit(part):
            args, kwargs = begin_unit_pass(model, args, kwargs)
        return args, kwargs

    def _begin(self, model: nn.Module) -> None:
        """Do what a pass of the script's begins with, on all ranks, or on rank 0 alone."""
        if is_in_transform(forward=False):  # of vmap, grad, vjp or jacrev; jvp goes through the hooks well
            msg = f"{script_line()}: a transform of torch.func computes {type(model).__name__}, which is sharded"
            raise ShardingError(msg, hint="run this script in one process: --num-processes 1 --shard off")
        if not self.checked:
            self.checked = True
            self.check()
            if is_unit(model) and not is_in_pass(model):
                take_for_outermost(model)  # also where a part is called first
        if not self.trained and model.training and torch.is_grad_enabled():
            self.trained = True
            self.hook_context.streams.diverge()
        self.alone = self.begin_pass(model)

    def _note(self, model: nn.Module, part: nn.Module, args: Any, kwargs: Any) -> None:
        if not model.training or not torch.is_grad_enabled():
            return
        leaves = tree_leaves((args, kwargs))
        if part is model and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            from fsdplaunch.runtime.auto.model.double_backward import ModelPass

            self.twice = ModelPass(model, args, kwargs)
        self.hook_context.batches.enter([*args, *kwargs.values()])

    def _leave(self, part: nn.Module, args: Any, _kwargs: Any, output: Any) -> Any:
        """End a pass; return what the script gets. `output` is None after an error."""
        if torch.compiler.is_compiling() or not self.outermost or part is not self.outermost[0]:
            return None
        self.outermost.pop()
        if self.outermost:
            return None
        model: Any = self.model()
        if self.alone is not None:
            alone, self.alone = self.alone, None
            return alone.end(model, output)
        if part is not model and not is_unit(part):
            output = end_unit_pass(model, args, apart_from_parameters(output))
        if self.divided is not None:
            output = self.divided.end(output)
        if self.twice is not None and not (self.divided is not None and self.divided.measuring):
            self.twice.keep(output)
            self.twice = None
        if not torch.is_grad_enabled():
            model.reshard()
        else:
            self.view.leave(model)
        return output


_calls: "weakref.WeakKeyDictionary[nn.Module, Calls]" = weakref.WeakKeyDictionary()


def _not_compiled(hook: Any) -> Any:
    """Return a function of this module, by which hooks of ours are known, that calls one outside of graphs."""
    disabled = torch.compiler.disable(hook)

    def call(*given: Any) -> Any:
        return disabled(*given)

    return call


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with parameters down to the next units, whose parts are full only in their own passes."""
    for child in module.children():
        if next(iter(parameters_of(child)), None) is not None:
            yield child
            if not is_unit(child):
                yield from _parts(child)


def _call_for_forward(unit: nn.Module) -> None:
    """Let a script that calls `unit.forward(x)` have what `unit(x)` does, where hooks gather the parameters.

    What it returns is not a parameter, because the memory of those is given back after it.
    """
    if "forward" in unit.__dict__:  # the script's own way for this module
        unit.register_forward_hook(return_no_parameters, prepend=True)
        return
    kind: Any = original_class(unit)
    plain, of, in_pass = kind.forward, weakref.ref(unit), pass_look(unit)

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        module: Any = of()
        if torch.compiler.is_compiling():
            return plain(module, *args, **kwargs)
        if in_pass():
            return apart_from_parameters(plain(module, *args, **kwargs))
        return nn.Module.__call__(module, *args, **kwargs)  # a class may call forward in a __call__ of its own

    unit.__dict__["forward"] = forward


def _normalising(norm: "weakref.ref[Any]") -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(given: torch.Tensor) -> torch.Tensor:
        module: Any = norm()
        mixed = module.weight is not None and module.running_mean is not None and given.device.type == "cpu"
        if not mixed or module.weight.dtype == module.running_mean.dtype:
            return type(module).forward(module, given)  # type: ignore[no-any-return]
        kept = {"weight": module.weight, "bias": module.bias}
        try:
            for name, param in kept.items():
                put_tensor(module, name, param.to(module.running_mean.dtype))
            return type(module).forward(module, given)  # type: ignore[no-any-return]
        finally:
            for name, param in kept.items():
                put_tensor(module, name, param)

    return forward


def original_name(model: nn.Module) -> str:
    """Return the name of the class a module had before it was sharded."""
    return original_class(model).__name__


def _acts(hook_context: HookContext) -> bool:
    return bool(hook_context.ownership.ours and hook_context.models)


def _begin_backward(hook_context: HookContext) -> None:
    batches = hook_context.batches
    if hook_context.data.size == hook_context.size > 1 and not hook_context.keeps_batch:
        batches.compare_rows(hook_context.device, ranked=hook_context.ownership.ranked)
    batches.leave()


def backward(
    original: Any,
    hook_context: HookContext,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stand for `torch.autograd.backward`, which `Tensor.backward` calls."""
    if _acts(hook_context):
        if create_graph:
            from fsdplaunch.runtime.auto.model.double_backward import refuse_create_graph

            raise refuse_create_graph()
        _begin_backward(hook_context)
    with ExitStack() as stack:
        for calls in list(_calls.values()):
            if calls.divided is not None:
                stack.enter_context(calls.divided.recomputing())
        return original(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)


def grad(
    original: Any,
    hook_context: HookContext,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stand for `torch.autograd.grad`."""
    if isinstance(inputs, Iterator | ValuesView):  # model.parameters() is read once
        inputs = tuple(inputs)
    if _acts(hook_context) and not makes_graph() and not is_of_transform(outputs):
        from fsdplaunch.runtime.auto.model.double_backward import own_gradients

        models, begin = list(hook_context.models), functools.partial(_begin_backward, hook_context)
        how = (grad_outputs, retain_graph, create_graph)
        found = own_gradients(original, outputs, inputs, *how, models=models, begin=begin)
        if found is not None:
            return found
    return original(outputs, inputs, grad_outputs, retain_graph, create_graph, *args, **kwargs)
