"""torch's private names are used in one folder, and each of them is in the torch that is installed."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdplaunch

PACKAGE = Path(fsdplaunch.__file__).parent
HOME = PACKAGE / "runtime" / "torch_internals"
OVERRIDDEN = {"_start", "_poll", "_close"}
"""Methods that torch's base class PContext asks a subclass to define."""
READERS = ("checkpoint",)
"""What reads files compares the names that stand in them, and does not import torch for them."""
FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if HOME not in path.parents and not set(READERS) & set(path.parts)
)


OTHERS = {
    **{"_exit": "os and libc", "_getframe": "sys", "_current_frames": "sys", "_replace": "named tuples"},
    **{"_from_config": "transformers", "_save": "transformers", "_no_split_modules": "transformers"},
    **{"_tp_plan": "transformers", "_init_weights": "transformers", "_fields": "named tuples"},
    **{"_keys_to_ignore_on_load_missing": "transformers", "_keys_to_ignore_on_load_unexpected": "transformers"},
    **{"_prepare_backend": "accelerate", "_shared_state": "accelerate", "_optimizers": "accelerate"},
    **{"_distributed": "datasets", "_registry": "weakref"},
}
"""Private names of others than torch, and whose."""
GUESSED = ("getattr", "hasattr", "setattr", "delattr")


def private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def definitions(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines itself, as functions, classes, fields and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def uses(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Private modules and names of torch in imports and texts; private attributes that nobody here defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (f"{node.module}: {name}" for name in names if private(name))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch.")]
            yield from (name for name in names if any(map(private, name.split("."))))
        elif isinstance(node, ast.Constant) and re.match(r"torch\.\S*$", str(node.value)):
            yield from [node.value] if any(map(private, node.value.split("."))) else []
        elif isinstance(node, ast.Attribute):
            yield from [ast.unparse(node)] if private(node.attr) and node.attr not in known else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GUESSED:
            texts = [one.value for one in node.args[1:2] if isinstance(one, ast.Constant)]
            yield from (text for text in texts if private(str(text)) and text not in known)


def test_private_names_of_torch_are_used_in_one_folder_only() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    own = {path: set(definitions(tree)) for path, tree in trees.items()}
    known = set().union(*own.values()) - OVERRIDDEN | set(OTHERS)
    found = [f"{path.name}: {use}" for path, tree in trees.items() for use in uses(tree, known | own[path])]
    assert found == []


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
