"""Find out whether the running code catches an error and goes on: `try: os.mkdir(lock)` waits for another then.

Read from the source of what is on the stack. A failure that would end the script is no answer that it waits for;
one that it goes on after may be how its ranks, or a library's, exclude each other.
"""

import argparse
import ast
import builtins
import functools
import linecache
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fsdplaunch.runtime import script
from fsdplaunch.runtime.script_line import is_user_file

_EXITS = ("exit", "_exit", "quit", "abort")
_OWN = str(Path(__file__).parents[4]) + "/"
_STANDARD = tuple(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib"))
_INSTALLED = ("/site-packages/", "/dist-packages/")  # inside of Python's own folder
_RUNS_SCRIPTS = script.__name__
_GOES_ON = None


@dataclass(frozen=True, slots=True)
class _Guard:
    """One clause that may catch what is raised in some lines of a file.

    Attributes:
        statement: The line at which the statement begins.
        first: The first of the lines.
        last: The last of them.
        caught: The expression of what it catches; None for everything.
        name: What it calls the error, or None.
        body: What it does then; () for one that only suppresses the error.
    """

    statement: int
    first: int
    last: int
    caught: ast.expr | None
    name: str | None
    body: tuple[ast.stmt, ...]

    @property
    def is_for_all(self) -> bool:
        """Return whether it catches every error."""
        return self.caught is None or _last_name(self.caught) in ("Exception", "BaseException")


def goes_on_after(error: type[BaseException], frame: FrameType | None) -> bool:
    """Return whether an error is caught by the user's code, or by a library that it calls, which goes on.

    Python's own modules are passed over: they catch errors to try another way, and raise what comes of it.

    Args:
        error: Its class.
        frame: The innermost frame that is asked.
    """
    raised: type[BaseException] | None = error
    for number, asked in enumerate(_asked(frame)):
        if raised is not None:
            raised = _after_frame(raised, asked, top_level=number > 0 and asked.f_code.co_name == "<module>")
    return raised is None


def _asked(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the user's code and of libraries that it calls, not of what calls it: click, hydra."""
    by_user = False
    while frame is not None and frame.f_globals.get("__name__") != _RUNS_SCRIPTS:
        file = frame.f_code.co_filename
        of_user = is_user_file(file)
        if of_user or not (by_user or is_foreign(file)):
            yield frame
        by_user = by_user or of_user
        frame = frame.f_back


def is_foreign(file: str) -> bool:
    """Return whether a file is Python's or this package's."""
    return file.startswith(("<frozen ", _OWN)) or (
        file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)
    )


def _after_frame(raised: type[BaseException], frame: FrameType, *, top_level: bool) -> type[BaseException] | None:
    """Return the class of what leaves a frame; None where it goes on.

    Args:
        raised: The class of what is raised in it.
        frame: The frame.
        top_level: Whether it is a file's own, which calls `main()`: a clause for every error reports it and ends.
    """
    guards = _guards(frame.f_code.co_filename)
    if guards is None:  # no source
        return _GOES_ON if frame.f_code.co_exceptiontable else raised
    passed = 0
    for guard in guards:
        around = guard.first <= (frame.f_lineno or 0) <= guard.last and guard.statement != passed
        if around and not (top_level and guard.is_for_all) and _catches(guard.caught, raised, frame):
            passed = guard.statement  # its other clauses do not see it
            outcome = _after_clause(guard, raised, frame)
            if outcome is None:
                return _GOES_ON
            raised = outcome
    return raised


@functools.cache
def _guards(file: str) -> tuple[_Guard, ...] | None:
    """Return the clauses of a file, the innermost first; None where there is no source."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
    found = [guard for node in ast.walk(tree) for guard in _guards_of(node)]
    found.sort(key=lambda guard: -guard.first)  # stable: the clauses of one statement keep their order
    return tuple(found) if tree.body else None


def _guards_of(node: ast.AST) -> Iterator[_Guard]:
    if isinstance(node, ast.Try | ast.TryStar):
        for clause in node.handlers:
            yield _Guard(node.lineno, *_lines(node.body), clause.type, clause.name, tuple(clause.body))
    elif isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and _last_name(call.func) == "suppress":
                yield _Guard(node.lineno, *_lines(node.body), ast.Tuple(call.args, ast.Load()), None, ())


def _lines(body: list[ast.stmt]) -> tuple[int, int]:
    return body[0].lineno, body[-1].end_lineno or body[-1].lineno


def _catches(caught: ast.expr | None, raised: type[BaseException], frame: FrameType) -> bool:
    """Return whether a clause catches a class of errors; what cannot be told is taken to."""
    if isinstance(caught, ast.Tuple):
        return any(_catches(each, raised, frame) for each in caught.elts)
    classes = None if caught is None else _value(caught, frame)
    if isinstance(classes, type):
        return issubclass(raised, classes)
    if isinstance(classes, tuple):
        return issubclass(raised, tuple(each for each in classes if isinstance(each, type)))
    return True


def _after_clause(guard: _Guard, raised: type[BaseException], frame: FrameType) -> type[BaseException] | None:
    """Return the class of what a clause raises in any case; None where it may go on."""
    for statement in guard.body:
        if isinstance(statement, ast.Raise):
            return _raised_by(statement, guard.name, raised, frame)
        if isinstance(statement, ast.Expr) and _is_exit(statement.value, frame):
            return SystemExit
        if any(isinstance(node, ast.Return | ast.Break | ast.Continue) for node in ast.walk(statement)):
            return _GOES_ON
    return _GOES_ON


def _raised_by(
    statement: ast.Raise, name: str | None, raised: type[BaseException], frame: FrameType
) -> type[BaseException]:
    given = statement.exc
    if given is None or (isinstance(given, ast.Name) and given.id == name):
        return raised
    value = _value(given.func if isinstance(given, ast.Call) else given, frame)
    return value if isinstance(value, type) and issubclass(value, BaseException) else Exception


def _is_exit(call: ast.expr, frame: FrameType) -> bool:
    if not isinstance(call, ast.Call):
        return False
    of_parser = isinstance(call.func, ast.Attribute) and isinstance(
        _value(call.func.value, frame), argparse.ArgumentParser
    )
    return _last_name(call.func) in _EXITS or (of_parser and _last_name(call.func) == "error")


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return what a name, or a name of a module, stands for in a frame; None for other expressions."""
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        return vars(owner).get(node.attr) if isinstance(owner, type(sys)) else None
    if not isinstance(node, ast.Name):
        return None
    for names in (frame.f_locals, frame.f_globals, vars(builtins)):
        if node.id in names:
            return names[node.id]
    return None
