"""Which kind of operation a node of a backward graph belongs to, by the name that torch gives it; all versions."""

from typing import Any

import torch

MOST_NODES = 5000
LINEAR = frozenset(
    (
        *("Add", "Sub", "Rsub", "Neg", "Mul", "Div", "Stack", "Cat", "Clone", "ToCopy", "Copy", "Alias"),
        *("View", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Slice", "Expand"),
        *("Permute", "Transpose", "T", "_ToTorchTensor", "_FromTorchTensor", "Redistribute"),
    )
)
"""Nodes that a reduction's value passes with a factor at most."""
ELEMENTWISE = LINEAR | frozenset(
    (
        *("Pow", "Abs", "Exp", "Log", "Log1P", "Expm1", "Sqrt", "Rsqrt", "Square", "Sign", "Reciprocal", "Xlogy"),
        *("Clamp", "ClampMin", "ClampMax", "Where", "Minimum", "Maximum", "MaskedFill"),
        *("Relu", "LeakyRelu", "Softplus", "LogSigmoid", "Sigmoid", "Tanh"),
    )
)
LOSSES = frozenset(
    (
        *("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
        *("NllLoss", "NllLoss2D", "MultiMarginLoss", "MultilabelMarginLoss", "SoftMarginLoss"),
    )
)
PRODUCTS = ("Mul", "Div")
_OF_MATRICES = ("Mm", "Bmm", "Addmm", "Baddbmm", "Mv", "Addmv", "Dot")
PLAIN = ("Sum", "Mean")
ALONG = frozenset(
    (
        *(*PLAIN, "Softmax", "LogSoftmax", "Logsumexp", "LinalgVectorNorm", "Norm", "Std", "Var"),
        *("Amax", "Amin", "Max", "Min", "Cumsum", "Gather"),
    )
)
"""Nodes that compute along some dimensions."""


_OF_ROWS = "fsdplaunch_of_rows"


def kind_of(node: Any) -> str:
    """Return a node's name without what all names end in: `MseLossBackward0` is `MseLoss`."""
    return str(node.name()).rsplit("::", 1)[-1].rstrip("0123456789").removesuffix("Backward")


def noted(node: Any) -> dict[Any, Any]:
    """Return what was noted at a node of a graph, to be read or added to."""
    notes: dict[Any, Any] = node.metadata
    return notes


_SHAPING = ("View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "T", "Squeeze", "Unsqueeze", "Alias")


def mark_rows(tensor: torch.Tensor) -> None:
    """Remember that a tensor is made of parameters and of this rank's rows, outside of a model.

    What it was computed by is below changes of its shape, as einsum makes them.
    """
    node = tensor.grad_fn
    while node is not None:
        noted(node)[_OF_ROWS] = True
        node = node.next_functions[0][0] if kind_of(node) in _SHAPING else None


def has_rows(node: Any) -> bool:
    """Return whether a node's result was marked as one of parameters and of rows."""
    return _OF_ROWS in noted(node)


def is_of_parameters(node: Any) -> bool:
    """Return whether only parameters are below a node, as below a penalty.

    They are sharded where the script takes them itself. Where it does so in the model's forward, or while they
    stay gathered after it, only arithmetic of single elements is between, and products of parameters.
    """
    waiting, seen = [node], set[Any]()
    simple = sharded = True
    while waiting and (simple or sharded) and len(seen) < MOST_NODES:
        each = waiting.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        name = kind_of(each)
        if has_rows(each):
            return False
        if name == "AccumulateGrad":
            sharded = sharded and hasattr(each.variable, "device_mesh")
        elif each is not node and name not in ELEMENTWISE and name not in PLAIN:
            multiplied = name in _OF_MATRICES and None not in [below for below, _ in each.next_functions]
            simple = simple and multiplied  # no rows: those have no gradient
        waiting += [below for below, _ in each.next_functions]
    return (simple or sharded) and len(seen) > 1
