"""The ways a layer can be split, under the names that transformers gives them in a model's plan."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.runtime.tensor_parallel.activations import copied, gathered, piece, summed
from fsdplaunch.runtime.tensor_parallel.layers import ALIKE, FULL, Cut, matrix_layer

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
HEAD_NORM = Style(summands=True)
"""Of a norm inside of split heads: its gradients are added up."""
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
    "replicated_with_grad_allreduce": HEAD_NORM,
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
