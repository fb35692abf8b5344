"""Paths of modules that stand in texts: each names something that is there. A wrong one would fail in silence."""

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import fsdplaunch
from fsdplaunch.launch import entry_points
from fsdplaunch.runtime import patch

PACKAGE = Path(fsdplaunch.__file__).parent
DOTTED = re.compile(r"\bfsdplaunch(?:\.[A-Za-z_]\w*)+")
OTHERS = {"fsdplaunch.json", "fsdplaunch.dev"}  # a file of checkpoints, and a domain


def texts() -> list[tuple[str, str]]:
    """Every dotted name of this package in a text of its source, with the file it stands in."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {(str(file.relative_to(PACKAGE)), name) for name in DOTTED.findall(node.value)}
    return sorted((file, name) for file, name in found if name not in OTHERS)


@cache
def names_of(module: str) -> frozenset[str]:
    """What a module's source defines or imports, without running it."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    if module == "fsdplaunch":
        return frozenset(fsdplaunch.__all__)
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return frozenset(stored | {node.name for node in tree.body if hasattr(node, "name")})


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or a name in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        try:
            spec = find_spec(module)
        except ModuleNotFoundError:
            continue
        if spec is not None:
            return count == len(parts) or parts[count] in names_of(module)
    return False


def test_every_name_in_a_text_is_there():
    found = texts()
    assert len(found) > 50
    assert [f"{file} names {name}" for file, name in found if not is_there(name)] == []


def test_modules_to_start_and_to_look_up_are_modules():
    assert entry_points.AGENT.is_file()
    started = [entry_points.BOOTSTRAP, entry_points.SSH_REMOTE, entry_points.NETWORK_TEST, entry_points.PLAIN_RUN]
    looked_up = [value for name, value in vars(patch).items() if name.isupper() and name[0] != "_"]
    assert len(looked_up) > 10
    assert all(map(is_there, looked_up))
    lists = [value for name, value in vars(entry_points).items() if name.startswith("PRELOADED")]
    assert len(lists) > 1
    preloaded = [name for each in lists for name in each]
    for name in (*started, *preloaded):
        assert name.startswith("torch.") or find_spec(name) is not None, name


def test_programs_started_by_their_path_take_their_folder_off_the_search_path():
    for file in ("agent/main.py", "agent/fork_server.py"):
        text = (PACKAGE / file).read_text()
        assert f'sys.path[0].endswith("{Path(file).parent.name}")' in text
