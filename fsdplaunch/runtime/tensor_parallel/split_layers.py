"""The forward of a split layer: the exchange before, this rank's part of the computation, the exchange after."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.display_text import listed
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection.units import has_shards
from fsdplaunch.runtime.tensor_parallel.plan import SplitNow, SplitPlan, build_plan
from fsdplaunch.runtime.tensor_parallel.styles import (
    Cut,
    OwnTensors,
    Style,
    full_parameters,
    local_parameters,
    matrix_layer,
)

_SPLIT = "_layer_split"
"""Where a layer holds how it is split."""


def split_layers(
    model: nn.Module,
    configured: Mapping[str, str],
    axis: DeviceMesh,
    *,
    shards: int,
    ignored: Collection[nn.Module] = (),
) -> SplitPlan:
    """Decide how a model's layers are split, and give each one a forward of its own.

    They compute as before until parameters are split.

    Args:
        model: Not sharded yet.
        configured: The configuration's plan; empty for the model's own.
        axis: The ranks that split them.
        shards: Ranks that each part is sharded over.
        ignored: Modules that stay as they are.

    Raises:
        ShardingError: The plan does not fit the model or names what is ignored, or the ranks do not divide it.
    """
    plan = build_plan(model, configured, axis, shards=shards)
    if names := [plan.names[module] for module in plan.modules if module in ignored]:
        msg = f"{listed(names, 3)} cannot be split and ignored"
        raise ShardingError(
            msg, hint="take it out of fsdp_ignored_modules, or out of sharding.tensor_parallel_plan"
        )
    holders = {module for module, _ in plan.cuts}
    for module, style in plan.modules.items():
        has_parts = any(each in holders for each in module.modules())
        split = LayerSplit(style=style, axis=plan.axis, cuts=plan.of(module), has_parts=has_parts, now=plan.now)
        module.__dict__ |= {_SPLIT: split, "forward": MethodType(split_forward, module)}
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSplit:
    """How one layer is split.

    Attributes:
        style: What is exchanged.
        axis: The ranks that split it.
        cuts: Of its own parameters, by attribute.
        now: Whether anything is exchanged at present.
        has_parts: Whether parameters in it are split, which shows whether it is a full copy.
    """

    style: Style
    axis: DeviceMesh
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    has_parts: bool = True
    now: SplitNow = field(default_factory=SplitNow)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerSplit":
        """Return the same for a copy of the layer; the ranks are the same."""
        return self


def split_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return what the full layer would, while its parameters are split; with full ones, as in a copy, as ever.

    It is a function of the layer and reads what it does from there: torch.compile then takes the blocks of a model
    for equal, and compiles one for all of them.
    """
    split: LayerSplit = module.__dict__[_SPLIT]
    if split.has_parts and not has_shards(module):
        return type(module).forward(module, *args, **kwargs)
    if not split.now.layers:
        with OwnTensors(module, full_parameters(module, split.cuts)):
            return type(module).forward(module, *args, **kwargs)
    args, kwargs = _entering(split, args, kwargs)
    return _leaving(module, split, _compute(module, split, args, kwargs))


def _entering(split: LayerSplit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    style = split.style
    if style.enter is None:
        return args, kwargs
    if not style.every_input and args:
        return (_enter(split, args[0]), *args[1:]), kwargs
    entered = {name: _enter(split, value) for name, value in kwargs.items()}
    return tuple(_enter(split, value) for value in args), entered


def _enter(split: LayerSplit, value: Any) -> Any:
    activations = isinstance(value, torch.Tensor) and value.is_floating_point()
    return split.style.enter(value, split.axis) if activations and split.style.enter else value


def _compute(module: nn.Module, split: LayerSplit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    layer = matrix_layer(module)
    if isinstance(module, nn.Embedding) and split.style.weights == "rows":
        return _look_up(module, split, *args, **kwargs)
    if layer is not None and layer.plain and len(args) == 1:
        bias = None if split.style.late_bias else _local(module, split, "bias")
        return layer.multiply(args[0], _local(module, split, "weight"), bias)
    tensors = local_parameters(module, split.cuts)
    if split.style.late_bias and "bias" in tensors:
        tensors["bias"] = None
    with OwnTensors(module, tensors):
        return type(module).forward(module, *args, **kwargs)


def _local(module: nn.Module, split: LayerSplit, attribute: str) -> Any:
    param = getattr(module, attribute, None)
    cut = split.cuts.get(attribute)
    return param if cut is None else cut.local(param)


def _look_up(module: nn.Embedding, split: LayerSplit, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows of this rank, and zeros for those that others have."""
    rows = module.num_embeddings // split.axis.size()
    first = rows * split.axis.get_local_rank()
    elsewhere = (ids < first) | (ids >= first + rows)
    padding = module.padding_idx
    own_padding = padding - first if padding is not None and first <= padding < first + rows else None
    with OwnTensors(module, local_parameters(module, split.cuts), padding_idx=own_padding):
        found = type(module).forward(module, (ids - first).masked_fill(elsewhere, 0))
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


def _leaving(module: nn.Module, split: LayerSplit, output: Any) -> Any:
    style, axis = split.style, split.axis
    if style.leave is None or output is None:
        return output
    if isinstance(output, tuple):
        return (style.leave(output[0], axis), *output[1:])
    output = style.leave(output, axis)
    bias = getattr(module, "bias", None) if style.late_bias else None
    return output if bias is None else output + bias
