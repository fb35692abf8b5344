"""What each entry point imports: start-up time and the workers' independence depend on it."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

PACKAGE = Path(__file__).parents[2] / "fsdplaunch"
HEAVY = ("torch", "rich", "questionary", "pydantic", "yaml")


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_help_imports_nothing_heavy():
    code = """
from fsdplaunch.cli.app import run
import io, contextlib
commands = ("launch", "config", "estimate", "doctor", "tune", "warm")
for words in (["--version"], ["--help"], *([name, "--help"] for name in commands)):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        status = run(words)
    assert status == 0, status
    assert "fsdplaunch" in text.getvalue()
"""
    assert modules_after(code).isdisjoint(HEAVY)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("fsdplaunch.config.environment", (*HEAVY, "typer")),  # the workers' side of the config
        ("fsdplaunch.checkpoint.merge.merge", ("torch",)),
    ],
)
def test_modules_that_start_fast_import_nothing_heavy(module, absent):
    assert modules_after(f"import {module}").isdisjoint(absent)


def test_public_names_resolve_to_what_they_name():
    import fsdplaunch

    missing = [name for name in fsdplaunch.__all__ if not hasattr(fsdplaunch, name)]
    assert missing == []
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = fsdplaunch.nope


def test_config_show_imports_only_the_yaml_reader():
    code = """
from fsdplaunch.cli.app import run
import io, contextlib
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    assert run(["config", "show"]) == 0
"""
    assert modules_after(code).intersection(HEAVY) == {"yaml"}


def test_launch_on_one_node_imports_nothing_of_several():
    found = modules_after("import fsdplaunch.cli.launch, fsdplaunch.launch.runner")
    several = {"coordinator", "join", "node_client", "node_info", "protocol", "server"}
    assert not found & {f"fsdplaunch.launch.coordination.{name}" for name in several}


def test_no_module_imports_itself_by_way_of_others():
    graph = grimp.build_graph("fsdplaunch", exclude_type_checking_imports=True, cache_dir=None)
    arrows = {name: graph.find_modules_directly_imported_by(name) - {name} for name in graph.modules}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_nothing_is_imported_before_a_ctrl_c_is_provided_for():
    loaded = modules_after("import fsdplaunch.__main__") - modules_after("")
    assert loaded == {"fsdplaunch", "fsdplaunch.__main__"}


def test_torch_xla_is_imported_in_its_own_folder_only_and_that_folder_only_inside_functions():
    homes = {PACKAGE / "runtime" / "xla", PACKAGE / "runtime" / "torch_internals" / "modules.py"}
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        everywhere, at_once = set(_imported(ast.walk(tree))), set(_imported(tree.body))
        own = bool(homes & {file, file.parent})
        assert own or not any(name.split(".")[0] == "torch_xla" for name in everywhere), file
        assert own or not any(name.startswith("fsdplaunch.runtime.xla") for name in at_once), file


def _imported(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
