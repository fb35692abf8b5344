"""Functions of scripts for TPUs that nothing calls; nothing here has torch_xla."""

from types import SimpleNamespace

import pytest

from fsdplaunch.errors import UsageError
from fsdplaunch.runtime.script import ScriptTarget, run_target
from fsdplaunch.runtime.xla.set_up import call_left_out, spawn_here

GUARD = "if __name__ == '__main__':\n    "


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    def run(text, function="main"):
        monkeypatch.setitem(__import__("sys").modules, "__main__", None)
        monkeypatch.setattr("sys.path", [])
        monkeypatch.setattr("sys.argv", [])
        path = tmp_path / "script.py"
        path.write_text(text)
        __import__("linecache").clearcache()
        run_target(ScriptTarget(name=str(path), is_module=False, arguments=()))
        call_left_out(function)
        return capsys.readouterr()

    return run


MAIN = "def main():\n    print('ran')\n"


@pytest.mark.parametrize(
    ("text", "function", "times"),
    [
        (MAIN, "main", 1),
        (MAIN + GUARD + "main()\n", "main", 1),
        (MAIN + "start = main\n", "main", 0),
        (MAIN + "import sys\ngetattr(sys.modules[__name__], 'main')\n", "main", 0),
        (MAIN.replace("main", "train"), "main", 0),
        (MAIN.replace("main", "train"), "train", 1),
        (MAIN.replace("main()", "main(index=0)"), "main", 1),
        ("class main:\n    pass\n", "main", 0),
        ("from os import getcwd as main\n", "main", 0),
    ],
)
def test_a_function_that_nothing_calls_is_called_once(run, text, function, times):
    printed = run(text, function)
    assert printed.out.count("ran") == times
    assert ("nothing in the script calls" in printed.err) == (times == 1 and GUARD not in text)


def test_one_that_wants_arguments_is_refused(run):
    with pytest.raises(UsageError, match="nothing calls main, and it wants index"):
        run("def main(index):\n    pass\n")


def test_a_scripts_own_spawn_runs_in_this_process():
    module, seen = SimpleNamespace(spawn=None), []
    spawn_here(module, lambda: 3)
    module.spawn(lambda index, *args: seen.append((index, args)), args=("a",), nprocs=8, start_method="fork")
    assert seen == [(3, ("a",))]
