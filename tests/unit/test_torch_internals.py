"""torch's private names are used in one folder, and each of them is in the torch that is installed."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fsdplaunch

PACKAGE = Path(fsdplaunch.__file__).parent
HOME = PACKAGE / "runtime" / "torch_internals"
OVERRIDDEN = {"_start", "_poll", "_close", "_update_peak_stats"}
"""Methods that torch's base classes (PContext, FSDPMemTracker) ask a subclass to define."""
READERS = ("checkpoint",)
"""What reads files compares the names that stand in them, and does not import torch for them."""
FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if HOME not in path.parents and not set(READERS) & set(path.parts)
)


def private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Private modules and names that are imported from torch, or named in a text that could be."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (f"{node.module}: {name}" for name in names if private(name))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch.")]
            yield from (name for name in names if any(map(private, name.split("."))))
        elif isinstance(node, ast.Constant) and re.match(r"torch\.\S*$", str(node.value)):
            yield from [node.value] if any(map(private, node.value.split("."))) else []


def own_names(tree: ast.AST) -> set[str]:
    """Private names that a file defines itself, as functions, classes, fields and attributes of `self`."""
    nodes = list(ast.walk(tree))
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    stored = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    fields = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return defined | stored | fields


def attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and private(node.attr))


@cache
def trees() -> dict[Path, ast.AST]:
    """Each file's syntax tree; not made at import, for each process of a run in parallel imports this file."""
    return {path: ast.parse(path.read_text()) for path in FILES}


@cache
def all_own() -> frozenset[str]:
    """Private names that the package defines."""
    return frozenset(name for tree in trees().values() for name in own_names(tree)) - OVERRIDDEN


KNOWN = {
    "_exit": "os and libc",
    "_getframe": "sys",
    "_current_frames": "sys",
    "_replace": "named tuples",
    "_from_config": "transformers",
    "_save": "transformers",
    "_optimizers": "accelerate",
    "_prepare_backend": "accelerate",
    "_shared_state": "accelerate",
}
"""Private names of others than torch, and whose."""
GUESSED = ("getattr", "hasattr", "setattr", "delattr")
NOT_TORCH = {
    "_no_split_modules": "transformers",
    "_tp_plan": "transformers",
    "_init_weights": "transformers",
    "_keys_to_ignore_on_load_missing": "transformers",
    "_keys_to_ignore_on_load_unexpected": "transformers",
    "_distributed": "datasets",
    "_fields": "named tuples",
}


def by_text(tree: ast.AST) -> Iterator[str]:
    """Private names that are asked for by a text: `getattr(x, "_name")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GUESSED:
            for argument in node.args[1:2]:
                if (
                    isinstance(argument, ast.Constant)
                    and isinstance(argument.value, str)
                    and private(argument.value)
                ):
                    yield argument.value


def uses(tree: ast.AST) -> Iterator[str]:
    """Every use of a private name of torch in one file."""
    own = all_own() | own_names(tree) | set(KNOWN)
    yield from imported(tree)
    yield from (ast.unparse(node) for node in attributes(tree) if node.attr not in own)
    yield from (name for name in by_text(tree) if name not in all_own() | set(NOT_TORCH))


def test_private_names_of_torch_are_used_in_one_folder_only() -> None:
    found = [f"{path.relative_to(PACKAGE)}: {use}" for path, tree in trees().items() for use in uses(tree)]
    assert found == []


def test_private_names_are_found() -> None:
    text = """
from torch.nn.modules.module import _IncompatibleKeys
import torch._dynamo
model._parameters
getattr(policy, "_run_policy")
LAZY = "torch._dynamo"
"""
    tree = ast.parse(text)
    assert sorted(imported(tree)) == [
        "torch._dynamo",
        "torch._dynamo",
        "torch.nn.modules.module: _IncompatibleKeys",
    ]
    assert [node.attr for node in attributes(tree)] == ["_parameters"]
    assert list(by_text(tree)) == ["_run_policy"]


@pytest.mark.parametrize(
    "module", sorted(".".join(path.relative_to(HOME).with_suffix("").parts) for path in HOME.rglob("*.py"))
)
def test_each_module_finds_its_names_in_this_torch(module: str) -> None:
    found = importlib.import_module(f"fsdplaunch.runtime.torch_internals.{module}")
    assert all(getattr(found, name) is not None for name in getattr(found, "__all__", ()))


def test_the_agent_does_not_import_fsdp() -> None:
    program = "import sys, fsdplaunch.agent.elastic_agent; print('torch.distributed.fsdp' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
