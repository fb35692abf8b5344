"""What nodes of a backward graph have saved of the operation they belong to; all versions, else empty."""

import math
from typing import Any, NamedTuple

import torch

from fsdplaunch.probe.torch_version import parse
from fsdplaunch.runtime.torch_internals.graphs.node_kinds import ELEMENTWISE, PLAIN, kind_of

_MOST_BELOW = 20


def takes_partial_passes(*, penalised_meshes: bool = False) -> bool:
    """Return whether a graph in which shards are penalised can be gone through in part before its backward.

    2.7.1 ends with SIGSEGV in the backward that follows; 2.8, 2.9, 2.11, 2.13 and 2.15 are right. Where the shards
    lie on meshes of several axes, 2.13 ends so as well.

    Args:
        penalised_meshes: Whether they do.
    """
    return not penalised_meshes and (parse(torch.__version__) or (2, 8)) >= (2, 8)


def is_in_backward() -> bool:
    """Return whether this thread runs a node of a backward pass; all versions."""
    return torch._C._current_graph_task_id() != -1


def loss_reduction(node: Any) -> int:
    """Return how a loss's node was reduced: 0 not at all, 1 by a mean, 2 by a sum."""
    return int(getattr(node, "_saved_reduction", 0))


def reduced_shape(node: Any) -> tuple[int, ...]:
    """Return the shape of what a node's operation reduced."""
    saved = getattr(getattr(node, "_saved_self", None), "shape", ())
    sizes: Any = getattr(node, "_saved_self_sym_sizes", saved)
    return tuple(int(size) for size in sizes)


def reduced_dims(node: Any) -> tuple[int, ...]:
    """Return the dimensions that a node's operation reduced."""
    rank = len(reduced_shape(node))
    dims = getattr(node, "_saved_dim", None)
    if not isinstance(dims, tuple) or not dims:
        return tuple(range(rank))
    return _from_the_start(dims, rank)


def _from_the_start(dims: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return dimensions counted from the first: torch has saved those from the last as unsigned numbers."""
    return tuple((dim - 2**64 if dim >= 2**63 else dim) % rank for dim in dims)


def operand_shape(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's first operand with a gradient, without a look at what is saved of it.

    What is saved may be computed again when it is looked at, as in a checkpointed block.
    """
    below, number = node.next_functions[0] if node.next_functions else (None, 0)
    known: Any = getattr(below, "_input_metadata", ())
    return tuple(int(size) for size in known[number].shape) if number < len(known) else ()


def along_dims(node: Any, rank: int) -> tuple[int, ...]:
    """Return the dimensions along which a node's operation computes; all where it names none.

    Args:
        node: Of an operation with one operand.
        rank: How many dimensions that has.
    """
    dims = getattr(node, "_saved_dim", None)
    dims = (dims,) if isinstance(dims, int) else dims
    return _from_the_start(dims, rank) if dims and rank else tuple(range(rank))


def multiplied_shapes(node: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the two matrices that a node has multiplied."""
    first, second = (getattr(node, f"_saved_{name}_sym_sizes", ()) for name in ("self", "mat2"))
    return tuple(int(size) for size in first), tuple(int(size) for size in second)


def reduced_elements(node: Any) -> float:
    """Return over how many elements a node's mean is: the script may have selected them, `loss[mask].mean()`."""
    shape = reduced_shape(node)
    dims = reduced_dims(node) if str(node.name()).startswith("MeanBackward") else range(len(shape))
    return float(math.prod(shape[dim] for dim in dims))


def computed_dims(node: Any) -> tuple[int, ...]:
    """Return the dimensions along which a node's operation, such as a softmax, computes; 0 where it is unsaid."""
    saved = [getattr(node, name, None) for name in ("_saved_result", "_saved_index")]
    shapes = [reduced_shape(node), *(getattr(value, "shape", ()) for value in saved)]
    rank = next((len(shape) for shape in shapes if shape), 0)
    dims = getattr(node, "_saved_dim", None)
    dims = dims if isinstance(dims, tuple) else (dims,)
    known = rank and dims and all(isinstance(dim, int) for dim in dims)
    return _from_the_start(dims, rank) if known else (0,)


def moves_rows(node: Any) -> bool:
    """Return whether a node puts another dimension in the place of the first."""
    name = str(node.name())
    dims = getattr(node, "_saved_dims", (0,))
    ways = {
        "Unsqueeze": getattr(node, "_saved_dim", 0) == 0,
        "Transpose": 0 in (getattr(node, "_saved_dim0", 0), getattr(node, "_saved_dim1", 0)),
        "Permute": not dims or dims[0] != 0,
        "TBackward": True,
    }
    return any(moves for kind, moves in ways.items() if name.startswith(kind))


def total_weight(node: Any) -> float | None:
    """Return the weight of all elements that a mean of log-likelihoods was divided by; None for other nodes."""
    weight = getattr(node, "_saved_total_weight", None)
    return float(weight.item()) if isinstance(weight, torch.Tensor) and weight.numel() == 1 else None


def fixed_factor(node: Any) -> torch.Tensor | None:
    """Return what a product of matrices multiplies by without a gradient for it; None for other nodes."""
    operands = node.next_functions
    if not str(node.name()).startswith(("MmBackward", "BmmBackward")) or len(operands) != 2:  # noqa: PLR2004
        return None
    fixed = {(True, False): "_saved_self", (False, True): "_saved_mat2"}
    name = fixed.get((operands[0][0] is None, operands[1][0] is None))
    value = getattr(node, name, None) if name else None
    return value if type(value) is torch.Tensor else None


class Factor(NamedTuple):
    """A number that a node multiplies its one operand with a gradient by.

    Attributes:
        value: inf where the script divides by 0.
        divides: Whether the script divides by its inverse.
        is_tensor: Whether the script has it in a tensor, not as a number of Python's.
    """

    value: float
    divides: bool
    is_tensor: bool


def scale_factor(node: Any) -> Factor | None:
    """Return the number that a node multiplies its one operand with a gradient by; None where there is none."""
    name = str(node.name())
    operands = node.next_functions
    if not name.startswith(("MulBackward", "DivBackward")) or not operands:
        return None
    first = len(operands) > 1 and operands[0][0] is None
    saved = getattr(node, "_saved_self" if first else "_saved_other", None)
    if type(saved) is torch.Tensor and saved.numel() == 1:
        number, is_tensor = float(saved.item()), not _is_python_number(saved)
    elif isinstance(saved, int | float):
        number, is_tensor = float(saved), False
    else:
        return None
    if name.startswith("Mul"):
        return Factor(number, divides=False, is_tensor=is_tensor)
    return Factor(1 / number if number else math.inf, divides=True, is_tensor=is_tensor)


def _is_python_number(saved: torch.Tensor) -> bool:
    """Return whether torch made a tensor of a number of Python's: such a one does not decide a result's dtype."""
    if saved.dim():
        return False
    other = torch.zeros((), dtype=torch.float16 if saved.is_floating_point() else torch.int8)
    return saved.dtype != other.dtype and torch.result_type(other, saved) == other.dtype


def counted_elements(node: Any) -> int | None:
    """Return how many elements below a sum's node count, by what the script has multiplied or selected by.

    Args:
        node: Of a sum. What its operations have saved is read, which waits for a device.

    Returns:
        None where it adds up all of them.
    """
    shape = reduced_shape(node)
    if shape and not math.prod(shape):
        return 0
    for _ in range(_MOST_BELOW):
        mask = _mask_of(node)
        if mask is not None:
            return int(mask.count_nonzero())
        below = [each for each, _ in node.next_functions if each is not None]
        if len(below) != 1 or kind_of(below[0]) not in _PASSED:
            return None
        node = below[0]
    return None


_PASSED = ELEMENTWISE | set(PLAIN) | {"NllLoss", "NllLoss2D"}


def _mask_of(node: Any) -> torch.Tensor | None:
    """Return what one operation leaves elements out by: a factor of each, what is filled, ignored labels."""
    name = kind_of(node)
    if name == "Mul":
        saved = (getattr(node, each, None) for each in ("_saved_other", "_saved_self"))
        return next((each for each in saved if type(each) is torch.Tensor and _is_fixed(each)), None)
    if name == "MaskedFill":
        filled: torch.Tensor = node._saved_mask
        return ~filled
    if name == "Where":
        condition, (one, other) = node._saved_condition, (below is not None for below, _ in node.next_functions)
        return None if one == other else condition if one else ~condition
    if name in ("NllLoss", "NllLoss2D"):
        return node._saved_target != node._saved_ignore_index  # type: ignore[no-any-return]
    return None


def _is_fixed(factor: torch.Tensor) -> bool:
    return factor.dim() > 0 and not factor.requires_grad
