"""Read in source code how many numbers a call draws, and where that number comes from."""

import ast
import linecache
from functools import cache
from itertools import islice
from types import CodeType, FrameType

from torch import nn

_ALL_ARGUMENTS = ("rand", "randn", "empty", "zeros", "ones", "random_sample", "standard_normal", "new")
"""Functions whose positional arguments are all of the size, as those of `new_empty` and `FloatTensor` are; others
have it last."""
_SIZE_NAMES = ("size", "num_samples", "sample_shape", "k", "steps", "end")
_MOST_CALLS = 3
"""Functions through which a size that is given to one is followed to who gives it."""


def is_fixed_call(frame: FrameType) -> bool:
    """Return whether the call that a frame is at is given only numbers as its size, or sizes that a model keeps.

    `torch.randn(self.out_features)` draws for no rows, though a rank's share may have as many; neither does
    `torch.randn(size)` in a function that is given them.
    """
    size = size_at(frame.f_code, frame.f_lasti)
    return bool(size) and all(_is_fixed(each, frame, _MOST_CALLS) for each in size)


def _is_fixed(node: ast.expr, frame: FrameType, calls: int) -> bool:
    if isinstance(node, ast.Tuple | ast.List):
        return all(_is_fixed(each, frame, calls) for each in node.elts)
    if isinstance(node, ast.Constant):
        return type(node.value) is int  # `training=True` is none
    if isinstance(node, ast.Attribute):
        return _is_kept_by_model(node, frame)
    given = _given(node.id, frame) if isinstance(node, ast.Name) and calls else None
    return given is not None and frame.f_back is not None and _is_fixed(given, frame.f_back, calls - 1)


def _is_kept_by_model(node: ast.Attribute, frame: FrameType) -> bool:
    """Return whether an expression is `self.features` of a module, set only where that is built."""
    owner = frame.f_locals.get(node.value.id) if isinstance(node.value, ast.Name) else None
    if not isinstance(owner, nn.Module) or type(vars(owner).get(node.attr)) is not int:
        return False
    return not _is_set_later(frame.f_code.co_filename, node.attr)


def _given(name: str, frame: FrameType) -> ast.expr | None:
    """Return what a function's caller has written for an argument of it; None if that is not known."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    if name not in names or frame.f_back is None or _sets(code, name):
        return None
    call = _expression(frame.f_back.f_code, frame.f_back.f_lasti)
    if not isinstance(call, ast.Call):
        return None
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    place = names.index(name) - (names[:1] == ("self",))
    starred = any(isinstance(each, ast.Starred) for each in call.args)
    return named.get(name) or (call.args[place] if 0 <= place < len(call.args) and not starred else None)


def _sets(code: CodeType, name: str) -> bool:
    lines = [line for line, _ in _assignments(code.co_filename, name)]
    last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
    return any(code.co_firstlineno <= line <= last for line in lines)


@cache
def _is_set_later(file: str, attribute: str) -> bool:
    """Return whether a file sets an attribute of `self` in any function but constructors."""
    functions = (node for node in _nodes(file) if isinstance(node, ast.FunctionDef) and node.name != "__init__")
    stores = (each for function in functions for each in ast.walk(function) if isinstance(each, ast.Attribute))
    return any(each.attr == attribute and isinstance(each.ctx, ast.Store) for each in stores)


def assigned(node: ast.expr, code: CodeType, line: int) -> ast.expr:
    """Return what a name was last set to above a line of its function; any other expression as it is."""
    if not isinstance(node, ast.Name):
        return node
    set_to = [value for at, value in _assignments(code.co_filename, node.id) if code.co_firstlineno <= at < line]
    return set_to[-1] if set_to else node


@cache
def _assignments(file: str, name: str) -> list[tuple[int, ast.expr]]:
    """Return the lines where a file sets a name, alone, and what to."""
    alone = (node for node in _nodes(file) if isinstance(node, ast.Assign) and len(node.targets) == 1)
    found = [(node.lineno, node.value) for node in alone if getattr(node.targets[0], "id", None) == name]
    return sorted(found, key=lambda each: each[0])


@cache
def _nodes(file: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:  # of a notebook
        return []


@cache
def size_at(code: CodeType, instruction: int) -> list[ast.expr]:
    """Return what says how many numbers a call draws, by an instruction of it; [] where that is not known."""
    expression = _expression(code, instruction)
    return [] if expression is None else _size_of(expression)


@cache
def _expression(code: CodeType, instruction: int) -> ast.expr | None:
    """Return the expression that an instruction is of; None without source."""
    try:
        return ast.parse(_source(code, instruction), mode="eval").body
    except SyntaxError:  # no source, or within an f-string, where Python knows no places
        return None


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
