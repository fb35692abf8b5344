"""How scripts for TPUs start: a function that a launcher calls in each process, and is not called by the script.

`accelerate launch` imports such a script and calls main_training_function; torch_xla's own `spawn` starts
processes that call one. Here the processes run already. Needs no torch_xla.
"""

import ast
import inspect
import linecache
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fsdplaunch.errors import UsageError
from fsdplaunch.runtime import messages


def call_left_out(function: str) -> None:
    """Call a function of the script that defines it and says nothing else of it, as `accelerate launch` does.

    Args:
        function: main_training_function of the configuration.

    Raises:
        UsageError: It cannot be called without arguments.
    """
    script = sys.modules["__main__"]
    found = vars(script).get(function)
    source = "".join(linecache.getlines(getattr(script, "__file__", None) or ""))
    if not inspect.isfunction(found) or found.__module__ != "__main__" or not _is_only_defined(function, source):
        return
    wanted = [name for name, each in inspect.signature(found).parameters.items() if _is_needed(each)]
    if wanted:
        msg = f"nothing calls {function}, and it wants {', '.join(wanted)}"
        raise UsageError(msg, hint="call it at the script's end, under if __name__ == '__main__'")
    messages.say(f"nothing in the script calls {function}: it is called now, as main_training_function")
    found()


def _is_only_defined(function: str, source: str) -> bool:
    """Tell whether a script defines a function at its top and names it nowhere else."""
    try:
        nodes = list(ast.walk(tree := ast.parse(source)))
    except SyntaxError:  # its text has changed meanwhile
        return False
    defined = any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body)
    named = any(isinstance(node, ast.Name | ast.Constant) and _word(node) == function for node in nodes)
    return defined and not named


def _word(node: ast.Name | ast.Constant) -> Any:
    return node.id if isinstance(node, ast.Name) else node.value


def _is_needed(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic


def spawn_here(spawning: Any, ordinal: Callable[[], int]) -> None:
    """Have torch_xla's `spawn` call its function here, in a process that was started for it.

    Args:
        spawning: The module `torch_xla.distributed.xla_multiprocessing`.
        ordinal: Returns this process's number among all.
    """

    def spawn(
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        nprocs: int | None = None,  # noqa: ARG001  (torch_xla's form)
        join: bool = True,  # noqa: ARG001
        daemon: bool = False,  # noqa: ARG001
        start_method: str = "spawn",  # noqa: ARG001
    ) -> None:
        fn(ordinal(), *args)

    spawning.spawn = spawn
