"""What the code that draws random numbers tells of their size, which alone does not say whether it is of rows.

A size that is written as numbers, `torch.rand(1)`, is the same for any batch, though a rank's share may have as
many rows. One that is computed of the rows, `torch.randint(0, t, (n // 2 + 1,))`, is another on each. A recurrent
layer of torch's has the rows in the second dimension.
"""

import ast
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from fsdplaunch.runtime.auto.rng.size_code import assigned, is_fixed_call, size_at
from fsdplaunch.runtime.script_line import is_user_file

_RECURRENT = frozenset(kind.forward.__code__ for kind in (nn.LSTM, nn.GRU, nn.RNN))
_PACKAGE = f"{Path(__file__).parents[3]}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_DISTRIBUTIONS = f"{Path(torch.distributions.__file__).parent}/"


def has_literal_size() -> bool:
    """Return whether the code that draws now is a call of the script's own with a size that no batch changes."""
    frame = _drawing_frame()
    return frame is not None and is_fixed_call(frame)


def has_size_of_rows(rows: Container[int], *, times: int = 0) -> bool:
    """Return whether the code that draws now is a call of the script's own with a size computed of rows' number.

    Args:
        rows: How many rows this rank's batches have.
        times: Whether it is their product with this number that is asked for; 0 for anything computed of them.
    """
    frame = _drawing_frame()
    if frame is None or not (size := size_at(frame.f_code, frame.f_lasti)):
        return False
    parts = size[0].elts if isinstance(size[0], ast.Tuple | ast.List) else size
    parts = [assigned(part, frame.f_code, frame.f_lineno) for part in parts[:1]]
    if not parts or not (isinstance(parts[0], ast.BinOp) or _is_count(parts[0])):
        return False
    found = _rows_in(parts[0], frame, rows)
    if not times:
        return bool(found)
    product = _is_count(parts[0]) or isinstance(getattr(parts[0], "op", None), ast.Mult)
    return product and bool(found) and (times not in found or len(found) == 1)  # pairs of rows are n * n


def is_recurrent_and_packed() -> bool | None:
    """Return whether the recurrent layer of torch's that draws now has packed sequences; None where none draws."""
    frame = _calling_frame()
    if frame is None or frame.f_code not in _RECURRENT:
        return None
    return frame.f_locals.get("batch_sizes") is not None


def sizes_of_distributions() -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the sizes that the innermost and the outermost of torch.distributions are asked for, if any draws."""
    shapes = [tuple(frame.f_locals["sample_shape"]) for frame in _sampling() if "sample_shape" in frame.f_locals]
    return (shapes[0], shapes[-1]) if shapes else None


def _sampling() -> Iterator[FrameType]:
    """Yield the frames of torch, the innermost first, if one of torch.distributions calls this package."""
    frame = _calling_frame()
    if frame is not None and frame.f_code.co_filename.startswith(_DISTRIBUTIONS):
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            yield frame
            frame = frame.f_back


def _drawing_frame() -> FrameType | None:
    """Return the frame that calls this package or torch.distributions, if it is of the script's own code."""
    frame = _calling_frame()
    for sampling in _sampling():
        frame = sampling.f_back
    return frame if frame is not None and is_user_file(frame.f_code.co_filename) else None


def _calling_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame


def _rows_in(computed: ast.expr, frame: FrameType, rows: Container[int]) -> list[int]:
    """Return the numbers of rows that an expression has names for, or for tensors of as many."""
    names = [node.id for node in ast.walk(computed) if isinstance(node, ast.Name)]
    values = [frame.f_locals.get(name, frame.f_globals.get(name)) for name in names]
    sizes = [len(each) if isinstance(each, torch.Tensor) and each.dim() else each for each in values]
    return [size for size in sizes if type(size) is int and size in rows]


def _is_count(node: ast.expr) -> bool:
    """Return whether an expression is `y.numel()`."""
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("numel", "nelement")
