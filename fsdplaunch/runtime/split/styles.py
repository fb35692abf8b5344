"""How a layer is split: the styles that plans name, the cuts of parameters, the exchanges at its borders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection.units import full_tensor
from fsdplaunch.runtime.torch_internals.modules import own_parameters, put_tensor


def copied(tensor: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return what all ranks have equally, for each to compute a part from: its gradients are added up."""
    return DTensor.from_local(tensor, axis, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def summed(tensor: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return the sum of what the ranks have, on each of them."""
    return _moved(tensor, axis, Partial(), Replicate())


def gathered(tensor: torch.Tensor, axis: DeviceMesh, dim: int = -1) -> torch.Tensor:
    """Return the ranks' pieces along a dimension, joined, on each of them."""
    return _moved(tensor, axis, Shard(dim % tensor.dim()), Replicate())


def piece(tensor: torch.Tensor, axis: DeviceMesh, dim: int = -1) -> torch.Tensor:
    """Return this rank's piece, along a dimension, of what all ranks have equally."""
    if tensor.size(dim) % axis.size():
        shape, ranks = tuple(tensor.shape), axis.size()
        msg = f"activations of {shape} cannot be divided along dimension {dim} by {ranks} ranks"
        hint = "use lengths that tp_size divides, or leave sequence_parallel out of the plan"
        raise ShardingError(msg, hint=hint)
    return _moved(tensor, axis, Replicate(), Shard(dim % tensor.dim()))


def _moved(tensor: torch.Tensor, axis: DeviceMesh, before: Placement, after: Placement) -> torch.Tensor:
    placed = DTensor.from_local(tensor, axis, [before], run_check=False)
    return _Itself.apply(placed.redistribute(placements=[after]).to_local())  # type: ignore[no-any-return,no-untyped-call]


class _Itself(torch.autograd.Function):
    """A tensor that is not a view of another one: changing a view in place would lose FSDP2's hooks on it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient


def matrix_outputs(module: nn.Module) -> int | None:
    """Return the dimension of a layer's matrix with one entry per output; None for another module.

    GPT-2's Conv1D, which is known by its name because transformers may not be installed, holds it transposed.
    """
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return 1
    return 0 if isinstance(module, nn.Linear) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a parameter is spread over the ranks that split a layer."""

    dim: int | None = None  # the dimension that is split; None where every rank keeps all of it
    # how many matrices are joined along the dimension, each to be split by itself. Their rows of one rank are
    # not a rectangle of the full tensor, which no checkpoint could hold: such a parameter is kept in full and
    # every rank computes with its own rows
    packed: int = 1
    # whether ranks compute their own activations with what every rank keeps, so that its gradients are summands;
    # otherwise all compute the same
    summands: bool = True
    # what DTensor calls it. It is made here: torch.compile takes a dimension that differs from one layer to the
    # next for a variable, of which no placement can be made
    placement: Placement = field(init=False)

    def __post_init__(self) -> None:
        placement = Replicate() if self.dim is None or self.packed > 1 else Shard(self.dim)
        object.__setattr__(self, "placement", placement)

    def split(self, full: torch.Tensor, axis: DeviceMesh) -> DTensor:
        """Return a full tensor, equal on all ranks, as one of which this rank has its shard in its own memory."""
        local = full
        if not self.placement.is_replicate():
            local = full.chunk(axis.size(), self.dim or 0)[axis.get_local_rank()].contiguous().clone()
        shape, stride = full.shape, full.stride()
        return DTensor.from_local(local, axis, [self.placement], run_check=False, shape=shape, stride=stride)

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
        return param.to_local() if self.placement.is_replicate() else full_tensor(param)


FULL = Cut()
ALIKE = Cut(summands=False)


class OwnTensors:
    """A context in which a module computes with its own parameters as plain tensors, for a forward of its own.

    Args:
        module: The module itself; those below it stay as they are.
        cuts: How its parameters are split, by attribute.
        full: Whether it computes with all of them; otherwise with what this rank has.
        without: Parameters that it computes without.
        attributes: What other attributes are meanwhile.
    """

    def __init__(
        self,
        module: nn.Module,
        cuts: Mapping[str, Cut],
        *,
        full: bool = False,
        without: tuple[str, ...] = (),
        **attributes: Any,
    ) -> None:
        self.module, self.attributes = module, attributes
        self.params = dict(own_parameters(module))
        self.tensors: dict[str, Any] = {}
        for name, param in self.params.items():
            cut = cuts.get(name, FULL)
            self.tensors[name] = cut.full(param) if full else None if name in without else cut.local(param)
        self.kept = {name: getattr(module, name) for name in attributes}

    def __enter__(self) -> None:
        for name, tensor in self.tensors.items():
            put_tensor(self.module, name, tensor)
        for name, value in self.attributes.items():
            setattr(self.module, name, value)

    def __exit__(self, *_: object) -> None:
        for name, param in self.params.items():
            put_tensor(self.module, name, param)
        for name, value in self.kept.items():
            setattr(self.module, name, value)


Weights = Literal["outputs", "inputs", "rows", "columns", "full"]
Exchange = Callable[[torch.Tensor, DeviceMesh], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """One way to split a layer."""

    # what of its parameters is split: along outputs or inputs of a matrix, or an embedding's rows or columns
    weights: Weights = "full"
    packed: int = 1  # how many matrices are joined in the weight, along that dimension
    enter: Exchange | None = None  # what becomes of the input, or of all inputs that are activations
    leave: Exchange | None = None  # what becomes of the output
    every_input: bool = False  # whether `enter` is for all inputs, not for the first alone
    late_bias: bool = False  # whether the bias is added to the sum of the ranks' outputs
    # whether each rank computes its own activations with what is not split, so that gradients add up
    summands: bool = False

    def cut(self, module: nn.Module, param: torch.Tensor) -> Cut | None:
        """Return how one parameter of a module is split; None where it stays as it is, the same on all ranks."""
        if self.weights == "full":  # what it lies in is known by it as a split layer
            return FULL if self.summands else ALIKE if self.enter or self.leave else None
        if self.weights in ("rows", "columns"):
            return Cut(dim=0 if self.weights == "rows" else 1)
        outputs = matrix_outputs(module)
        if param.dim() == 1:
            return None if outputs is not None and self.weights == "inputs" else Cut(dim=0, packed=self.packed)
        places = (param.dim() - 2, param.dim() - 1) if outputs is None else (outputs, 1 - outputs)
        return Cut(dim=places[self.weights == "inputs"], packed=self.packed)


def _shared_out(tensor: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return this rank's equal share of what is added up afterwards."""
    return tensor / axis.size()


_GATHERED = Style(weights="outputs", enter=copied, leave=gathered)
_SPLIT_INPUT = Style(weights="inputs", enter=piece, leave=summed, late_bias=True)
_EXPERTS = Style(enter=copied, leave=summed, every_input=True, summands=True)

STYLES = {
    "colwise": Style(weights="outputs", enter=copied),
    "colwise_rep": _GATHERED,
    "colwise_gather_output": _GATHERED,
    "rowwise": Style(weights="inputs", leave=summed, late_bias=True),
    "rowwise_rep": _SPLIT_INPUT,
    "rowwise_split_input": _SPLIT_INPUT,
    "embedding_rowwise": Style(weights="rows", leave=summed),
    "embedding_colwise": Style(weights="columns", leave=gathered),
    "packed_colwise": Style(weights="outputs", packed=2, enter=copied),
    "packed_rowwise": Style(weights="inputs", packed=2, leave=summed, late_bias=True),
    "local_colwise": Style(weights="outputs"),
    "local_rowwise": Style(weights="inputs"),
    "local_packed_colwise": Style(weights="outputs", packed=2),
    "local_packed_rowwise": Style(weights="inputs", packed=2),
    "local": Style(),
    "local_params": Style(),
    "gather": _EXPERTS,
    "moe_tp_experts": _EXPERTS,
    "moe_identity_expert": Style(enter=_shared_out),
    "all_reduce": Style(leave=summed),
    "replicated_with_grad_allreduce": Style(summands=True),
    "sequence_parallel": Style(enter=partial(piece, dim=1), leave=partial(gathered, dim=1), summands=True),
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
