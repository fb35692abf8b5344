"""Let rank 0 call a sharded model alone, without training it: `if rank == 0: evaluate(model)`.

The other ranks wait for it in what all ranks do next, and hand over their shards as for a save. Meanwhile rank 0's
modules have full parameters, and torch's hooks gather nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.rank0.pulling import Rank0Saves
from fsdplaunch.runtime.auto.state.rank0.shard_names import changes, is_over_all_ranks
from fsdplaunch.runtime.inspection.parameter_names import count
from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import mixed_precision_of, param_groups
from fsdplaunch.runtime.torch_internals.fsdp.suspended_units import cast_inputs, cast_output, suspend_unit
from fsdplaunch.runtime.torch_internals.modules import own_parameters, put_tensor
from fsdplaunch.runtime.torch_internals.wrappers import computes_compiled


class FullPasses:
    """The passes of one model that rank 0 makes alone.

    Args:
        name: The model's class.
        hook_context: This worker's.

    Attributes:
        fetched: Full parameters by the ids of shards, kept until all ranks go on.
        eager: Whether the next pass is not compiled, for who calls the model has seen that rank 0 makes it alone.
    """

    def __init__(self, name: str, hook_context: HookContext) -> None:
        self.name = name
        self.hook_context = hook_context
        self.eager = False
        self.fetched: dict[int, torch.Tensor] = {}
        self._values: list[int] = []
        self._undo: list[Callable[[], Any]] = []

    def can_be(self, model: nn.Module) -> bool:
        """Return whether rank 0 can make such a pass: FSDP2 has sharded the model, and nothing else divides it.

        What torch has compiled was compiled for gathered parameters.
        """
        context = self.hook_context
        trains = model.training and torch.is_grad_enabled()
        return (
            not trains
            and is_unit(model)
            and context.data.size == context.size
            and all(map(is_over_all_ranks, _shards(model)))
            and (self.eager or not computes_compiled(model, context.module_registry.alive()))
        )

    def begin(self, model: nn.Module, saves: Rank0Saves) -> "FullPasses":
        """Give the model's modules full parameters until `end`.

        What was fetched before is taken again where the others still wait and no shard was changed.

        Raises:
            CheckpointError: A rank has ended, or has shards of another moment.
        """
        shards = _shards(model)
        values = [changes(shard) for shard in shards]
        if not self.fetched or values != self._values:
            self._fetch(model, shards, saves)
            self._values = values
        for module in model.modules():
            for name, param in list(own_parameters(module)):
                if isinstance(param, DTensor):
                    put_tensor(module, name, self.fetched[id(param)])
                    self._undo.append(partial(put_tensor, module, name, param))
            if is_unit(module):
                self._undo.append(suspend_unit(module))
                if module is not model:
                    self._cast_around(module)
        return self

    def inputs(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments that the model's forward is to have."""
        return cast_inputs(model, args), cast_inputs(model, kwargs)

    def end(self, model: nn.Module, output: Any = None) -> Any:
        """Give the modules their shards back; return the output in the dtype that mixed precision has it in."""
        self.eager = False
        while self._undo:
            self._undo.pop()()
        return cast_output(model, output)

    def forget(self) -> None:
        """Give the memory of full parameters back: all ranks go on."""
        self.fetched, self._values = {}, []

    def _fetch(self, model: nn.Module, shards: list[DTensor], saves: Rank0Saves) -> None:
        self.forget()
        line, device = script_line(), self.hook_context.device
        call = f"{self.name} at {line}"
        dtypes = _dtypes(model)
        try:
            with torch.inference_mode(mode=False):  # a later pass may have gradients of what it is given
                for shard in shards:
                    full = saves.full(shard, call).to(device, dtypes.get(id(shard)))
                    self.fetched[id(shard)] = nn.Parameter(full, requires_grad=False)
        finally:
            saves.done()
        many = count(sum(each.numel() for each in self.fetched.values()))
        message = (
            f"{line}: rank 0 alone calls {self.name}: it gets the full parameters for that ({many}), and the"
            " other ranks wait"
        )
        if message not in self.hook_context.printed:
            self.hook_context.printed.add(message)
            messages.say(message)

    def _cast_around(self, unit: nn.Module) -> None:
        """Cast what a unit is given and returns, as torch does; before 2.13 not where nothing is gathered."""

        def before(unit: nn.Module, args: Any, kwargs: Any) -> Any:
            return self.inputs(unit, args, kwargs)

        self._undo.append(unit.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._undo.append(unit.register_forward_hook(lambda of, _, output: cast_output(of, output)).remove)


def _shards(model: nn.Module) -> list[Any]:
    """Return a model's sharded parameters, each once; also where a pass with gradients has left some gathered."""
    every = {id(param): param for module in model.modules() for _, param in own_parameters(module)}
    return [param for param in every.values() if isinstance(param, DTensor)]


def _dtypes(model: nn.Module) -> dict[int, torch.dtype | None]:
    """Return the dtype in which mixed precision has each sharded parameter, by id; None for its own."""
    groups = [group for unit in model.modules() if is_unit(unit) for group in param_groups(unit)]
    return {
        id(each.sharded_param): mixed_precision_of(group).param_dtype
        for group in groups
        for each in group.fsdp_params
    }
