"""What the code that draws random numbers tells of their size, which alone does not say whether it is of rows.

A size that is written as numbers, `torch.rand(1)`, is the same for any batch, though a rank's share may have as
many rows. One that is computed of the rows, `torch.randint(0, t, (n // 2 + 1,))`, is another on each. A recurrent
layer of torch's has the rows in the second dimension.
"""

import ast
import linecache
import sys
from collections.abc import Container, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

from fsdplaunch.runtime.auto.script_line import is_user_file

_RECURRENT = frozenset(kind.forward.__code__ for kind in (nn.LSTM, nn.GRU, nn.RNN))
_PACKAGE = f"{Path(__file__).parents[3]}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_DISTRIBUTIONS = f"{Path(torch.distributions.__file__).parent}/"
_ALL_ARGUMENTS = ("rand", "randn", "empty", "zeros", "ones", "random_sample", "standard_normal", "new")
_SIZE_NAMES = ("size", "num_samples", "sample_shape", "k", "steps", "end")
"""Functions whose positional arguments are all of the size, as those of `new_empty` and `FloatTensor` are; others
have it last."""


def has_literal_size() -> bool:
    """Return whether the code that draws now is a call of the script's own with only numbers as its size."""
    frame = _drawing_frame()
    return frame is not None and is_literal_call(frame)


def has_size_of_rows(rows: Container[int], *, times: int = 0) -> bool:
    """Return whether the code that draws now is a call of the script's own with a size computed of rows' number.

    Args:
        rows: How many rows this rank's batches have.
        times: Whether it is their product with this number that is asked for; 0 for anything computed of them.
    """
    frame = _drawing_frame()
    if frame is None or not (size := _size_at(frame.f_code, frame.f_lasti)):
        return False
    parts = size[0].elts if isinstance(size[0], ast.Tuple | ast.List) else size
    parts = [_assigned(part, frame.f_code, frame.f_lineno) for part in parts[:1]]
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


def _assigned(node: ast.expr, code: CodeType, line: int) -> ast.expr:
    """Return what a name was last set to above a line of its function; any other expression as it is."""
    if not isinstance(node, ast.Name):
        return node
    set_to = [value for at, value in _assignments(code.co_filename, node.id) if code.co_firstlineno <= at < line]
    return set_to[-1] if set_to else node


@cache
def _assignments(file: str, name: str) -> list[tuple[int, ast.expr]]:
    """Return the lines where a file sets a name, alone, and what to."""
    try:
        nodes = ast.walk(ast.parse("".join(linecache.getlines(file))))
    except SyntaxError:  # of a notebook
        return []
    alone = (node for node in nodes if isinstance(node, ast.Assign) and len(node.targets) == 1)
    found = [(node.lineno, node.value) for node in alone if getattr(node.targets[0], "id", None) == name]
    return sorted(found, key=lambda each: each[0])


def _is_count(node: ast.expr) -> bool:
    """Return whether an expression is `y.numel()`."""
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("numel", "nelement")


def is_literal_call(frame: FrameType) -> bool:
    """Return whether the call that a frame is at is given only numbers as the size of what it draws."""
    return _is_literal(frame.f_code, frame.f_lasti)


def _is_literal(code: CodeType, instruction: int) -> bool:
    size = _size_at(code, instruction)
    return bool(size) and all(map(_is_number, size))


@cache
def _size_at(code: CodeType, instruction: int) -> list[ast.expr]:
    """Return what says how many numbers a call draws, by an instruction of it; [] where that is not known."""
    try:
        return _size_of(ast.parse(_source(code, instruction), mode="eval").body)
    except SyntaxError:  # no source, or within an f-string, where Python knows no places
        return []


def _source(code: CodeType, instruction: int) -> str:
    """Return the source of the expression that an instruction is of."""
    first, last, start, stop = next(islice(code.co_positions(), instruction // 2, None))
    if first is None or last is None:
        return ""
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
    if lines:
        lines[-1] = lines[-1][:stop]
        lines[0] = lines[0][start:]
    return b"".join(lines).decode()


def _size_of(node: ast.expr) -> list[ast.expr]:
    """Return the arguments of a call that say how many numbers are drawn; [] where none is known to."""
    if not isinstance(node, ast.Call):
        return []
    named = [keyword.value for keyword in node.keywords if keyword.arg in _SIZE_NAMES]
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name.endswith("_"):  # `torch.empty(1).uniform_()`
        return _size_of(node.func.value) if isinstance(node.func, ast.Attribute) else []
    if named or _makes(name):
        return named or (node.args[:1] if name.endswith("full") else node.args)
    args = node.args[1:2] if name == "choice" else [each for each in node.args if not _is_switch(each)][-1:]
    made = args and isinstance(args[0], ast.Call) and _makes(getattr(args[0].func, "attr", ""))
    return _size_of(args[0]) if made else args  # `bernoulli(full((n, 3), 0.5))`


def _makes(name: str) -> bool:
    """Return whether a function makes a tensor of a size that it is given, first or as all its arguments."""
    return name in _ALL_ARGUMENTS or name.startswith("new_") or name.endswith(("Tensor", "full"))


def _is_switch(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is bool


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List):
        return all(map(_is_number, node.elts))
    return isinstance(node, ast.Constant) and type(node.value) is int  # `training=True` is none
