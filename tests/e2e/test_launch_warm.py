"""A launch from an interpreter that another run has left behind is as a cold one, but for the time it takes."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from tests.e2e.conftest import clean_environ, gone_within, starting
from tests.e2e.test_launch_invisible import PROBE, differences

PRINTING = "import os, sys\nprint('imported')\nos.environ['FROM_IMPORT'] = '1'\n"
WAITING = """
import os, sys, time
open("up" + os.environ["RANK"], "w").write(f"{os.getpid()} {os.getppid()}")
time.sleep(300)
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """Return a function that launches a script, first of all once in the cold."""
    folder = tmp_path_factory.mktemp("warm")
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    (folder / "own_module.py").write_text(PRINTING)
    (folder / "helper.py").write_text("")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environ = {"XDG_RUNTIME_DIR": str(runtime), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with starting(folder) as start:

        def launch(text, *, keep="60", **popen):
            options = ("--preload", "own_module", "--keep-warm", keep)
            return start(text, *options, env=environ | popen.pop("env", {}), **popen)

        launch.environ = clean_environ() | environ
        launch.folder = folder
        first = launch("print('cold')")
        assert first.end() == 0, first.stderr
        assert (first.stdout, first.json("agent.json")["warm"]) == ("imported\ncold\n", False)
        yield launch
        subprocess.run(
            [sys.executable, "-m", "fsdplaunch", "warm", "--stop"], env=launch.environ, check=True, timeout=60
        )
        assert not list((runtime / "fsdplaunch_warm").iterdir())


def forked(run):
    """Assert that a launch ended well, and that it was forked."""
    assert run.end() == 0, run.stderr
    assert run.json("agent.json")["warm"] is True
    return run


def odd_conditions():
    os.umask(0o027)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, 4000))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})


def test_script_sees_what_python_would_show_it(warm):
    place = warm.folder / "place"
    place.mkdir()
    (place / "t.py").write_text(PROBE)
    (place / "helper.py").write_text("")
    own = {"NEW": "a b", "OMP_NUM_THREADS": "1", "FROM_IMPORT": "1"}
    with (place / "out").open("w") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        alone = warm.environ | own | {"RANK": "9"}
        command = [sys.executable, "-u", "t.py"]
        subprocess.run(command, cwd=place, env=alone, check=True, preexec_fn=odd_conditions, **streams)
    with starting(place) as start:
        options = ("--preload", "own_module", "--keep-warm", "60")
        run = start(PROBE, *options, env=warm.environ | {"NEW": "a b"}, preexec_fn=odd_conditions)
        forked(run)
    assert run.stdout == "imported\n"  # as the first launch, which did import it
    expected, seen = (json.loads((place / f"facts{rank}.json").read_text()) for rank in (9, 1))
    assert differences(expected, seen) == {}


def test_killed_launcher_leaves_nothing_but_the_interpreter(warm):
    run = warm(WAITING)
    pids = [int(word) for rank in range(2) for word in run.wait_for(f"up{rank}").split()]
    run.signal(signal.SIGKILL)
    assert gone_within(pids, 10) == []
    forked(warm("pass"))
