"""How one rank's part of a split layer's parameters is cut, and what a forward sees of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fsdplaunch.runtime.torch_internals.modules import own_parameters, put_tensor


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
    """Return how a layer's matrix lies, or None for a module that is no such layer.

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
            rank are no rectangle of the whole, which no checkpoint could hold: such a parameter is kept in full
            and every rank computes with its own rows.
    """

    dim: int | None = None
    packed: int = 1

    @property
    def placement(self) -> Placement:
        """Return what DTensor calls it."""
        return Replicate() if self.dim is None or self.packed > 1 else Shard(self.dim)

    def split(self, full: torch.Tensor, axis: DeviceMesh) -> DTensor:
        """Return a full tensor, equal on all ranks, as one of which this rank has a part in its own memory."""
        local = full if self.placement.is_replicate() else self._rows(full, axis).clone()
        return DTensor.from_local(
            local, axis, [self.placement], run_check=False, shape=full.shape, stride=full.stride()
        )

    def _rows(self, full: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
        return full.chunk(axis.size(), self.dim or 0)[axis.get_local_rank()].contiguous()

    def local(self, param: Any) -> Any:
        """Return what this rank computes with of a parameter, with the gradient that belongs to it.

        What every rank has in full it computes its own activations with, so that its gradients are summands.
        """
        if not isinstance(param, DTensor):
            return param
        if not self.placement.is_replicate():
            return param.to_local()
        full, axis = param.to_local(grad_placements=[Partial()]), param.device_mesh
        if self.dim is None:
            return full
        parts = (
            part.chunk(axis.size(), self.dim)[axis.get_local_rank()] for part in full.chunk(self.packed, self.dim)
        )
        return torch.cat(list(parts), self.dim)


FULL = Cut()


def is_split(module: nn.Module) -> bool:
    """Return whether a module's parameters are those of this rank, as sharding has made them."""
    return any(isinstance(param, DTensor) for param in module.parameters())


@contextmanager
def local_parameters(module: nn.Module, cuts: Mapping[str, Cut], **attributes: Any) -> Iterator[None]:
    """Let a module have its parameters as plain tensors of this rank, for a forward of its own.

    Args:
        module: The module itself; those below it stay as they are.
        cuts: By the parameter's attribute.
        attributes: What other attributes are meanwhile, parameters among them.
    """
    params = dict(own_parameters(module))
    others = {name: value for name, value in attributes.items() if name not in params}
    kept = {name: getattr(module, name) for name in others}
    for name, param in params.items():
        put_tensor(
            module, name, attributes.get(name, ...) if name in attributes else cuts.get(name, FULL).local(param)
        )
    module.__dict__.update(others)
    try:
        yield
    finally:
        for name, param in params.items():
            put_tensor(module, name, param)
        module.__dict__.update(kept)
