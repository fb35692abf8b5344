"""How a layer is split: the styles that plans name, the cuts of parameters, the exchanges at its borders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.torch_internals.modules import own_parameters, put_tensor


def copied(tensor: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return what all ranks have equally, for each to compute a part from: its gradients are added up."""
    return _placed(tensor, axis, Replicate()).to_local(grad_placements=[Partial()])


def summed(tensor: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return the sum of what the ranks have, on each of them."""
    return _moved(tensor, axis, Partial(), Replicate())


def gathered(tensor: torch.Tensor, axis: DeviceMesh, dim: int = -1) -> torch.Tensor:
    """Return the ranks' pieces along a dimension, joined, on each of them."""
    return _moved(tensor, axis, Shard(dim % tensor.dim()), Replicate())


def piece(tensor: torch.Tensor, axis: DeviceMesh, dim: int = -1) -> torch.Tensor:
    """Return this rank's piece, along a dimension, of what all ranks have equally.

    Raises:
        ShardingError: The ranks do not divide it.
    """
    if tensor.size(dim) % axis.size():
        msg = (
            f"activations of {tuple(tensor.shape)} cannot be divided along dimension {dim} by {axis.size()} ranks"
        )
        raise ShardingError(
            msg, hint="use lengths that tp_size divides, or leave sequence_parallel out of the plan"
        )
    return _moved(tensor, axis, Replicate(), Shard(dim % tensor.dim()))


def _placed(tensor: torch.Tensor, axis: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(tensor, axis, [placement], run_check=False)


def _moved(tensor: torch.Tensor, axis: DeviceMesh, before: Placement, after: Placement) -> torch.Tensor:
    return _Itself.apply(_placed(tensor, axis, before).redistribute(placements=[after]).to_local())  # type: ignore[no-any-return,no-untyped-call]


class _Itself(torch.autograd.Function):
    """A tensor that is not a view of another one: changing a view in place would lose FSDP2's hooks on it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixLayer:
    """How the weight of a layer that multiplies by a matrix lies.

    Attributes:
        outputs: The dimension with one entry per output.
        inputs: That with one entry per input.
        plain: Whether the layer computes nothing but the product and the bias.
    """

    outputs: int
    inputs: int
    plain: bool

    def multiply(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the product, with the bias where there is one."""
        return nn.functional.linear(inputs, weight if self.outputs == 0 else weight.t(), bias)


def matrix_layer(module: nn.Module) -> MatrixLayer | None:
    """Return how a layer's matrix lies, or None for a module that is not such a layer.

    GPT-2's Conv1D, which is known by its name because transformers may not be installed, holds it transposed.
    """
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return MatrixLayer(outputs=1, inputs=0, plain=True)
    if isinstance(module, nn.Linear):
        return MatrixLayer(outputs=0, inputs=1, plain=type(module).forward is nn.Linear.forward)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a parameter is spread over the ranks that split a layer.

    Attributes:
        dim: The dimension that is split; None where every rank keeps all of it.
        packed: How many matrices are joined along the dimension, each to be split by itself. Their rows of one
            rank are not a rectangle of the full tensor, which no checkpoint could hold: such a parameter is kept
            in full and every rank computes with its own rows.
        summands: Whether ranks compute their own activations with what every rank keeps, so that its gradients are
            summands; otherwise all compute the same.
        placement: What DTensor calls it. It is made here: torch.compile takes a dimension that differs from one
            layer to the next for a variable, of which no placement can be made.
    """

    dim: int | None = None
    packed: int = 1
    summands: bool = True
    placement: Placement = field(init=False)

    def __post_init__(self) -> None:
        placement = Replicate() if self.dim is None or self.packed > 1 else Shard(self.dim)
        object.__setattr__(self, "placement", placement)

    def split(self, full: torch.Tensor, axis: DeviceMesh) -> DTensor:
        """Return a full tensor, equal on all ranks, as one of which this rank has its shard in its own memory."""
        local = full if self.placement.is_replicate() else self._rows(full, axis).clone()
        return DTensor.from_local(
            local, axis, [self.placement], run_check=False, shape=full.shape, stride=full.stride()
        )

    def _rows(self, full: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
        return full.chunk(axis.size(), self.dim or 0)[axis.get_local_rank()].contiguous()

    def local(self, param: Any) -> Any:
        """Return what this rank computes with of a parameter, with the gradient that belongs to it."""
        if not isinstance(param, DTensor):
            return param
        if not self.placement.is_replicate():
            return param.to_local()
        gradients = Partial() if self.summands else Replicate()
        full, axis = param.to_local(grad_placements=[gradients]), param.device_mesh
        if self.dim is None:
            return full
        parts = (
            part.chunk(axis.size(), self.dim)[axis.get_local_rank()] for part in full.chunk(self.packed, self.dim)
        )
        return torch.cat(list(parts), self.dim)

    def full(self, param: Any) -> Any:
        """Return all of a parameter, for a computation that is not split."""
        if not isinstance(param, DTensor):
            return param
        return param.to_local() if self.placement.is_replicate() else param.full_tensor()


FULL = Cut()
ALIKE = Cut(summands=False)


class OwnTensors:
    """A context in which a module has other tensors as its parameters, for a forward of its own.

    A class, because torch.compile of torch 2.7 does not see through a generator.

    Args:
        module: The module itself; those below it stay as they are.
        tensors: By the parameter's attribute.
        attributes: What other attributes are meanwhile.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, Any], **attributes: Any) -> None:
        self.module, self.tensors, self.attributes = module, tensors, attributes
        self.params = dict(own_parameters(module))
        self.kept = {name: getattr(module, name) for name in attributes}

    def __enter__(self) -> None:
        for name in self.params:
            put_tensor(self.module, name, self.tensors[name])
        for name, value in self.attributes.items():
            setattr(self.module, name, value)

    def __exit__(self, *_: object) -> None:
        for name, param in self.params.items():
            put_tensor(self.module, name, param)
        for name, value in self.kept.items():
            setattr(self.module, name, value)


def local_parameters(module: nn.Module, cuts: Mapping[str, Cut]) -> dict[str, Any]:
    """Return a module's own parameters as plain tensors of this rank, by attribute."""
    return {name: cuts.get(name, FULL).local(param) for name, param in own_parameters(module)}


def full_parameters(module: nn.Module, cuts: Mapping[str, Cut]) -> dict[str, Any]:
    """Return all of a module's own parameters, gathered from the ranks that split them, by attribute."""
    return {name: cuts.get(name, FULL).full(param) for name, param in own_parameters(module)}


Weights = Literal["outputs", "inputs", "rows", "columns", "full"]
Exchange = Callable[[torch.Tensor, DeviceMesh], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """One way to split a layer.

    Attributes:
        weights: What of its parameters is split: along outputs or inputs of a matrix, or an embedding's rows or
            columns.
        packed: How many matrices are joined in the weight, along that dimension.
        enter: What becomes of the input, or of all inputs that are activations.
        leave: What becomes of the output.
        every_input: Whether `enter` is for all inputs, not for the first alone.
        late_bias: Whether the bias is added to the sum of the ranks' outputs.
        summands: Whether each rank computes its own activations with what is not split, so that gradients add up.
    """

    weights: Weights = "full"
    packed: int = 1
    enter: Exchange | None = None
    leave: Exchange | None = None
    every_input: bool = False
    late_bias: bool = False
    summands: bool = False

    @property
    def splits(self) -> bool:
        """Return whether it splits parameters."""
        return self.weights != "full"

    def cut(self, module: nn.Module, param: torch.Tensor) -> Cut | None:
        """Return how one parameter of a module is split; None where it stays as it is, the same on all ranks."""
        layer = matrix_layer(module)
        if not self.splits:
            return self._kept()
        if param.dim() == 1 and layer is not None and self.weights == "inputs":
            return None
        if self.weights in ("rows", "columns"):
            return Cut(dim=0 if self.weights == "rows" else 1)
        if param.dim() == 1:
            return Cut(dim=0, packed=self.packed)
        if layer is not None:
            return Cut(dim=layer.outputs if self.weights == "outputs" else layer.inputs, packed=self.packed)
        return Cut(dim=param.dim() - (2 if self.weights == "outputs" else 1), packed=self.packed)

    def _kept(self) -> Cut | None:
        """Return how a parameter that is not split is kept; what it lies in is known by it as a split layer."""
        if self.summands:
            return FULL
        return ALIKE if self.enter or self.leave else None


def sequence_piece(tensor: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return this rank's piece of the sequence, the second dimension."""
    return piece(tensor, axis, 1)


def sequence_gathered(tensor: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return the ranks' pieces of the sequence, joined."""
    return gathered(tensor, axis, 1)


def shared_out(tensor: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return this rank's equal share of what is added up afterwards."""
    return tensor / axis.size()


_COLWISE = Style(weights="outputs", enter=copied)
_GATHERED = Style(weights="outputs", enter=copied, leave=gathered)
_ROWWISE = Style(weights="inputs", leave=summed, late_bias=True)
_SPLIT_INPUT = Style(weights="inputs", enter=piece, leave=summed, late_bias=True)
_EXPERTS = Style(enter=copied, leave=summed, every_input=True, summands=True)
_PACKED_COLWISE = Style(weights="outputs", packed=2, enter=copied)
_PACKED_ROWWISE = Style(weights="inputs", packed=2, leave=summed, late_bias=True)

STYLES = {
    "colwise": _COLWISE,
    "colwise_rep": _GATHERED,
    "colwise_gather_output": _GATHERED,
    "rowwise": _ROWWISE,
    "rowwise_rep": _SPLIT_INPUT,
    "rowwise_split_input": _SPLIT_INPUT,
    "embedding_rowwise": Style(weights="rows", leave=summed),
    "embedding_colwise": Style(weights="columns", leave=gathered),
    "packed_colwise": _PACKED_COLWISE,
    "packed_rowwise": _PACKED_ROWWISE,
    "local_colwise": Style(weights="outputs"),
    "local_rowwise": Style(weights="inputs"),
    "local_packed_colwise": Style(weights="outputs", packed=2),
    "local_packed_rowwise": Style(weights="inputs", packed=2),
    "local": Style(),
    "local_params": Style(),
    "gather": _EXPERTS,
    "moe_tp_experts": _EXPERTS,
    "moe_identity_expert": Style(enter=shared_out),
    "all_reduce": Style(leave=summed),
    "replicated_with_grad_allreduce": Style(summands=True),
    "sequence_parallel": Style(enter=sequence_piece, leave=sequence_gathered, summands=True),
    "replicate": Style(),
}
"""Of transformers 4.57 to 5.23."""

ROPE = "mla_kv_a_proj"
"""The projection of latent attention whose last outputs go to every head: their gradients are added up."""


def known_styles() -> list[str]:
    """Return the names of all styles."""
    return sorted([*STYLES, ROPE])


@cache
def rope_style(width: int) -> Style:
    """Return the style of a projection whose last `width` outputs go to the heads of all ranks.

    It is one object for all layers, so that one compiled block serves them.
    """

    def last_copied(tensor: Any, axis: DeviceMesh) -> Any:
        rest, rope = tensor.split([tensor.shape[-1] - width, width], dim=-1)
        return torch.cat([rest, copied(rope, axis)], dim=-1)

    return Style(leave=last_copied)
