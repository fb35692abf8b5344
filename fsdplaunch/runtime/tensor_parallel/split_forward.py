"""The forward of a split layer: the exchange before, this rank's part of the computation, the exchange after."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.runtime.tensor_parallel.layers import Cut, is_split, local_parameters, matrix_layer
from fsdplaunch.runtime.tensor_parallel.split_plan import SplitPlan
from fsdplaunch.runtime.tensor_parallel.styles import Style


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSplit:
    """How one layer is split.

    Attributes:
        style: What is exchanged.
        axis: The ranks that split it.
        cuts: Of its own parameters, by attribute.
    """

    style: Style
    axis: DeviceMesh
    cuts: Mapping[str, Cut] = field(default_factory=dict)


class SplitForward:
    """A layer's forward while its parameters are split; with full ones, as in a copy of the model, its own."""

    def __init__(self, module: nn.Module, split: LayerSplit) -> None:
        self.module = module
        self.split = split

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the full layer would."""
        if not is_split(self.module) and next(self.module.parameters(), None) is not None:
            return type(self.module).forward(self.module, *args, **kwargs)
        args, kwargs = self._entering(args, kwargs)
        output = self._compute(args, kwargs)
        return self._leaving(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitForward":
        """Return the forward of a copy of the layer; the ranks are the same."""
        return SplitForward(copy.deepcopy(self.module, memo), self.split)

    def _entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        style = self.split.style
        if style.enter is None:
            return args, kwargs
        if not style.every_input and args:
            return (self._enter(args[0]), *args[1:]), kwargs
        return tuple(map(self._enter, args)), {name: self._enter(value) for name, value in kwargs.items()}

    def _enter(self, value: Any) -> Any:
        activations = isinstance(value, torch.Tensor) and value.is_floating_point()
        return self.split.style.enter(value, self.split.axis) if activations and self.split.style.enter else value

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, layer = self.module, matrix_layer(self.module)
        if isinstance(module, nn.Embedding) and self.split.style.weights == "rows":
            return self._look_up(module, *args, **kwargs)
        if layer is not None and layer.plain and len(args) == 1:
            return layer.multiply(args[0], self._local("weight"), self._early_bias())
        late = {"bias": None} if self.split.style.late_bias and hasattr(module, "bias") else {}
        with local_parameters(module, self.split.cuts, **late):
            return type(module).forward(module, *args, **kwargs)

    def _early_bias(self) -> Any:
        return None if self.split.style.late_bias else self._local("bias")

    def _local(self, attribute: str) -> Any:
        param = getattr(self.module, attribute, None)
        cut = self.split.cuts.get(attribute)
        return param if cut is None else cut.local(param)

    def _look_up(self, module: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank, and zeros for those that others have."""
        rows = module.num_embeddings // self.split.axis.size()
        first = rows * self.split.axis.get_local_rank()
        elsewhere = (ids < first) | (ids >= first + rows)
        padding = module.padding_idx
        own_padding = padding - first if padding is not None and first <= padding < first + rows else None
        with local_parameters(module, self.split.cuts, padding_idx=own_padding):
            found = type(module).forward(module, (ids - first).masked_fill(elsewhere, 0))
        return found.masked_fill(elsewhere.unsqueeze(-1), 0)

    def _leaving(self, output: Any) -> Any:
        style, axis = self.split.style, self.split.axis
        if style.leave is None or output is None:
            return output
        if isinstance(output, tuple):
            return (style.leave(output[0], axis), *output[1:])
        output = style.leave(output, axis)
        bias = getattr(self.module, "bias", None) if style.late_bias else None
        return output if bias is None else output + bias


def split_forwards(plan: SplitPlan) -> None:
    """Give each layer that is split a forward of its own, which computes as before until parameters are split."""
    for module, style in plan.modules.items():
        split = LayerSplit(style=style, axis=plan.axis, cuts=plan.of(module))
        module.__dict__["forward"] = SplitForward(module, split)
