"""Run a user's script as `python SCRIPT` or `python -m MODULE` would, inside a process that is already running.

`runpy` is not used: it puts the old `__main__` back and empties the script's namespace when the script ends,
but exit handlers, threads, `multiprocessing` children and pickled objects of the script still need both. Here the
new `__main__` module stays for the rest of the process, as it does under the interpreter itself.
"""

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from fsdplaunch.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptTarget:
    """What the command line names.

    Attributes:
        name: The script's path or the module's name, as written.
        is_module: Whether `name` is a module (`-m`).
        arguments: What the script finds in `sys.argv[1:]`.
    """

    name: str
    is_module: bool
    arguments: tuple[str, ...]


def parse_target(argv: list[str]) -> ScriptTarget:
    """Read `[-m] SCRIPT_OR_MODULE [ARGS...]`; everything after the name belongs to the script."""
    is_module = argv[:1] == ["-m"]
    rest = argv[1:] if is_module else argv
    if not rest:
        msg = "no script to run"
        raise UsageError(msg, hint="name a script, or a module after -m")
    return ScriptTarget(name=rest[0], is_module=is_module, arguments=tuple(rest[1:]))


def run_target(target: ScriptTarget) -> None:
    """Execute the target as `__main__`; whatever it raises, SystemExit included, comes out."""
    module, code = _module(target.name) if target.is_module else _script(target.name)
    sys.argv = [str(module.__file__) if target.is_module else target.name, *target.arguments]
    sys.modules["__main__"] = module
    exec(code, module.__dict__)  # noqa: S102  (running the user's program is the purpose)


def _script(name: str) -> tuple[ModuleType, CodeType]:
    file = os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118  (as python does: absolute, and otherwise as written)
    path = Path(file)
    if path.is_dir() or zipfile.is_zipfile(path):
        _set_first_path(str(path))
        return _found(importlib.machinery.PathFinder.find_spec("__main__", [str(path)]), name)
    try:
        with io.open_code(file) as stream:
            source = stream.read()
    except OSError as error:
        msg = f"cannot read script {name}: {error.strerror}"
        raise UsageError(msg, hint="give the path of a Python file, or a module after -m") from None
    _set_first_path(str(path.resolve().parent))
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    return _main_module(file=file, loader=loader), compile(source, file, "exec", dont_inherit=True)


def _module(name: str) -> tuple[ModuleType, CodeType]:
    _set_first_path(str(Path.cwd()))
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    return _found(spec, name)


def _found(spec: importlib.machinery.ModuleSpec | None, name: str) -> tuple[ModuleType, CodeType]:
    """Return the namespace and the code of a module that import machinery found."""
    loader: Any = None if spec is None else spec.loader
    if spec is None or not hasattr(loader, "get_code"):
        msg = f"no module to run at {name}"
        raise UsageError(msg, hint="check the name and the folder the launch is started in")
    code = loader.get_code(spec.name)
    module = _main_module(file=spec.origin, loader=loader)
    module.__dict__.update(__spec__=spec, __package__=spec.parent, __cached__=spec.cached)
    return module, code


def _main_module(*, file: str | None, loader: Any) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=file, __loader__=loader, __builtins__=builtins, __cached__=None, __annotations__={}
    )
    return module


def _set_first_path(folder: str) -> None:
    """Put the script's folder where python puts it, in place of the folder this worker was started in."""
    if sys.flags.safe_path:
        return
    if sys.path and sys.path[0] in ("", str(Path.cwd())):
        sys.path[0] = folder
    else:
        sys.path.insert(0, folder)


def user_traceback(failure: BaseException) -> TracebackType | None:
    """Return the traceback without the frames above the user's first line; None when no such line was reached."""
    frame = failure.__traceback__
    mine = str(Path(__file__).parent)
    while frame is not None and _is_ours(frame.tb_frame.f_code.co_filename, mine):
        frame = frame.tb_next
    return frame


def _is_ours(filename: str, folder: str) -> bool:
    return filename.startswith((folder + os.sep, "<frozen importlib"))
