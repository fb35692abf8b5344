"""Hook the calls of one sharded model: its first forward pass, passes without gradients, and methods that compute.

Needed because FSDP2 gathers parameters around `forward` only, keeps the root's gathered until backward, and
takes no notice of parameters that appear later.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.model.computing_methods import computing_methods
from fsdplaunch.runtime.auto.model.double_backward import ModelPass, keep_pass, may_be_differentiated_twice
from fsdplaunch.runtime.auto.model.gathered_view import view_of
from fsdplaunch.runtime.auto.model.inner_calls import gather_around_parts
from fsdplaunch.runtime.auto.state.rank0.full_passes import FullPasses
from fsdplaunch.runtime.inspection.parameter_names import named_parameters
from fsdplaunch.runtime.inspection.units import is_unit, original_class
from fsdplaunch.runtime.script_line import being_built, script_line
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import pass_look
from fsdplaunch.runtime.torch_internals.modules import computes_without_gradients
from fsdplaunch.runtime.torch_internals.tensors import apart_from_parameters, return_no_parameters, tree_map


class ForwardHooks:
    """One model's calls."""

    def __init__(
        self,
        model: nn.Module,
        line: str,
        *,
        begin_pass: Callable[[nn.Module], FullPasses | None],
        begin_training: Callable[[], None],
        trains: Callable[[], bool],
        enter: Callable[[Iterable[Any]], None],
        leave: Callable[[Any], None],
    ) -> None:
        self.noted, self.returned = enter, leave
        self.depth = 0
        self.begin_pass = begin_pass
        self.alone: FullPasses | None = None
        self.rng_state: torch.Tensor | None = None
        self.buffers: dict[str, torch.Tensor] = {}
        self.begin_training: Callable[[], None] | None = begin_training
        self.model = weakref.ref(model)
        self.line = line
        self.known = {id(param) for param in model.parameters()}
        self.checked = False
        model.register_forward_pre_hook(
            self._enter, prepend=True, with_kwargs=True
        )  # before torch's own exchanges parameters
        model.register_forward_hook(self._leave, always_call=True, with_kwargs=True)
        for unit in model.modules():
            if is_unit(unit):
                call_for_forward(unit)
        for name in computing_methods(model):
            self._gather_around(model, name)
        self.first_calls = gather_around_parts(model, begin_pass, self._check_first)
        self.view = view_of(model, trains)

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin a pass; return other arguments where some are shards, such as a state made like a parameter."""
        if not self.checked:
            self._check_first()
        if self.begin_training is not None and model.training and torch.is_grad_enabled():
            torch.compiler.disable(self.begin_training)()  # a compiled model's hooks are traced
            self.begin_training = None
        if self.depth == 0:
            self.alone = self.begin_pass(model)
            if self.alone is not None:
                self.depth += 1
                return self.alone.inputs(model, args, kwargs)
            if not torch.compiler.is_compiling():
                self.view.enter(model)
        if not self.depth and model.training and not torch.compiler.is_compiling():
            self.noted([*args, *kwargs.values()])
            twice = torch.is_grad_enabled() and may_be_differentiated_twice(args, kwargs)
            self.rng_state = torch.get_rng_state() if twice else None
            self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()} if twice else {}
        self.depth += 1
        return None if torch.compiler.is_compiling() else _full_arguments(args, kwargs)

    def _check_first(self) -> None:
        """Check once, before the first pass, that the parameters are those that were sharded."""
        if not self.checked:
            self.checked = True
            self.check()
            for handle in self.first_calls:
                handle.remove()

    def check(self) -> None:
        """Check that the model has the parameters that were sharded and no others.

        Raises:
            ShardingError: It has another one.
        """
        model: Any = self.model()
        for name, param in named_parameters(model):
            if id(param) not in self.known:
                raise late_parameter(model, name, self.line)

    def _leave(self, model: Any, args: Any, kwargs: Any, output: Any) -> Any:
        self.depth -= 1
        if self.alone is not None:
            return output if self.depth else self._end_alone(model, output)
        if self.rng_state is not None and not self.depth:
            given = {"args": args, "kwargs": kwargs}
            made = ModelPass(model=self.model, rng_state=self.rng_state, buffers=self.buffers, **given)
            keep_pass(made, output)
            self.rng_state, self.buffers = None, {}
        if self.depth == 0:
            if model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self.returned(output)
            self._free(model)
        return output

    def _end_alone(self, model: nn.Module, output: Any) -> Any:
        alone, self.alone = self.alone, None
        return output if alone is None else alone.end(model, output)

    def _free(self, model: Any) -> None:
        """Reshard where no backward pass will: what the script looks at next are the shards again."""
        if not torch.is_grad_enabled():
            model.reshard()
        elif not torch.compiler.is_compiling():
            self.view.leave(model)

    def _gather_around(self, model: nn.Module, name: str) -> None:
        """Gather parameters around a method as around forward, where the script calls it itself, with tensors."""
        gathered = model.__dict__.get(name)
        plain = getattr(model, name)
        gradients = not computes_without_gradients(plain)
        model_of: Any = self.model
        if gathered is None:
            model.__dict__[name] = _returning_copies(plain)
            register_fsdp_forward_method(model, name)
            gathered = model.__dict__[name]

        @functools.wraps(plain)
        def call_gathered(*args: Any, **kwargs: Any) -> Any:
            if self.depth or not any(isinstance(arg, torch.Tensor) for arg in [*args, *kwargs.values()]):
                return plain(*args, **kwargs)
            with torch.set_grad_enabled(gradients and torch.is_grad_enabled()):
                args, kwargs = self._enter(model_of(), args, kwargs) or (args, kwargs)
            _gathering.append(f"{original_name(model_of())}.{name}")
            try:
                return gathered(*args, **kwargs)
            finally:
                _gathering.pop()
                self.depth -= 1
                if self.depth == 0:
                    self._free(model_of()) if self.alone is None else self._end_alone(model_of(), None)

        call_gathered.fsdplaunch_gathers = True  # type: ignore[attr-defined]
        model.__dict__[name] = call_gathered


def _returning_copies(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return apart_from_parameters(method(*args, **kwargs))

    return call


def _full_arguments(args: Any, kwargs: Any) -> Any:
    """Return arguments with full tensors in the place of shards; None where there are none.

    A shard that has a gradient stays: to gather it would lose what other ranks' rows add to that.
    """
    if not any(_is_shard(value) for value in (*args, *kwargs.values())):
        return None
    return tree_map(lambda value: value.full_tensor() if _is_plain_shard(value) else value, (args, kwargs))


def _is_shard(value: Any) -> bool:
    return isinstance(value, DTensor) or (
        isinstance(value, list | tuple) and any(isinstance(each, DTensor) for each in value)
    )


def _is_plain_shard(value: Any) -> bool:
    return isinstance(value, DTensor) and not value.requires_grad


_gathering: list[str] = []
"""The methods around which parameters are gathered now, the innermost last."""


def check_not_gathered() -> None:
    """Check that a backward pass does not begin inside a method around which parameters are gathered.

    Raises:
        ShardingError: It does. The gradients would be those of gathered parameters, which are given back after it.
    """
    if _gathering:
        msg = f"{script_line()}: backward inside of {_gathering[-1]}, around which parameters are gathered"
        hint = "call backward outside of the method, or call fsdplaunch.prepare(model, optimizer) in the script"
        raise ShardingError(msg, hint=hint)


def call_for_forward(unit: nn.Module) -> None:
    """Let a script that calls `unit.forward(x)` have what `unit(x)` does, where hooks gather the parameters.

    What it returns is no parameter, whose memory is given back after it.
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


def late_parameter(model: nn.Module, name: str, line: str) -> ShardingError:
    """Return the error for a parameter that a model got after it was sharded."""
    now = script_line()
    msg = f"{now}: {name} of {original_name(model)} appeared after the model was sharded at {line}"
    hint = (
        f"complete the model before {line}; or call fsdplaunch.prepare(model, optimizer) in the script when it is"
    )
    if now == line and any(each is model for each in being_built()):  # the script cannot be changed there
        hint = (
            f"{line} builds an optimizer before its model is complete, inside of a library: after it, give"
            " fsdplaunch.prepare each part that the library computes with, and the optimizers"
            " (fsdplaunch.prepare(model.actor, model.critic, model.actor.optimizer, model.critic.optimizer))"
        )
    return ShardingError(msg, hint=hint)


def original_name(model: nn.Module) -> str:
    """Return the name of the class a module had before it was sharded."""
    return original_class(model).__name__
