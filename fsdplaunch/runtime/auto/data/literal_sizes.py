"""Whether a script's call has its size written as numbers: `torch.rand(1)` draws as many for any batch.

Needed where a rank's share has as many rows: the line of source tells one number for all from one for each row.
"""

import ast
import linecache
import sys
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

from fsdplaunch.runtime.auto.script_line import is_user_file

_PACKAGE = f"{Path(__file__).parents[3]}/"
_ALL_ARGUMENTS = ("rand", "randn", "empty", "zeros", "ones", "random_sample", "standard_normal")
"""Functions whose positional arguments are all of the size; others have it last."""


def has_literal_size() -> bool:
    """Return whether the code that draws now is a call of the script's own with only numbers as its size."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename) and is_literal_call(frame)


def is_literal_call(frame: FrameType) -> bool:
    """Return whether the call that a frame is at is given only numbers as the size of what it draws."""
    return _is_literal(frame.f_code, frame.f_lasti)


@cache
def _is_literal(code: CodeType, instruction: int) -> bool:
    try:
        node = ast.parse(_source(code, instruction), mode="eval").body
    except SyntaxError:  # no source, or within an f-string, where Python knows no places
        return False
    size = _size_of(node)
    return bool(size) and all(map(_is_number, size))


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
    named = [keyword.value for keyword in node.keywords if keyword.arg == "size"]
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name.endswith("_"):  # `torch.empty(1).uniform_()`
        return _size_of(node.func.value) if isinstance(node.func, ast.Attribute) else []
    return named or (node.args if name in _ALL_ARGUMENTS else node.args[-1:])


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List):
        return all(map(_is_number, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, int)
