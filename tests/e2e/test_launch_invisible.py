"""A launched script cannot tell that it was not started by `python -u`: compared with a run that was."""

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.conftest import clean_environ

PROBE = """
import gc, importlib, json, locale, multiprocessing, os, resource, signal, sys, threading, time, warnings

def stream(s):
    return [type(s).__name__, s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(),
            type(s.buffer).__name__, s.newlines, s.fileno(), s.seekable()]

def opened(number):  # what a descriptor leads to
    try:
        place = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return "the listing itself"
    return place.partition(":")[0]

facts = {
    "names": sorted(name for name in globals() if name.startswith("__")),
    "main": [__name__, __file__, __doc__, __package__, __spec__ and __spec__.name, type(__builtins__).__name__,
             sys.modules["__main__"].__dict__ is globals()],
    "argv": sys.argv, "path": sys.path, "flags": str(sys.flags), "orig_argv": sys.orig_argv,
    "streams": [stream(s) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "originals": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "signals": {s.name: str(signal.getsignal(s)) for s in signal.Signals},
    "mask": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "threads": [t.name for t in threading.enumerate()],
    "tasks": len(os.listdir("/proc/self/task")),
    "processes": [multiprocessing.current_process().name, multiprocessing.parent_process(),
                  multiprocessing.get_start_method(allow_none=True), multiprocessing.active_children()],
    "place": [os.getcwd(), os.umask(0o22), os.nice(0), sorted(os.sched_getaffinity(0))],
    "hooks": [sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__,
              sys.gettrace(), sys.getprofile()],
    "limits": [sys.getrecursionlimit(), gc.isenabled(), gc.get_threshold(), gc.get_debug(),
               resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NOFILE)],
    "locale": locale.setlocale(locale.LC_ALL),
    # The rank keeps files of its own in the folder of the run.
    "files": sorted(opened(n) for n in os.listdir("/proc/self/fd") if int(n) > 2 and "/runs/" not in opened(n)),
    "shown": [word for word in open("/proc/self/cmdline").read().split("\\0") if word],
    "name": open("/proc/self/comm").read(),
    "young": time.process_time() < 20,
    "python": [sys.executable, sys.prefix, sys.dont_write_bytecode, sys.pycache_prefix],
    "handlers": [str(h) for h in importlib.import_module("logging").root.handlers],
    "filters": [str(f) for f in warnings.filters if f[2].__module__ == "builtins" and not f[1]],
    "helper": importlib.import_module("helper").__name__,
}
with open(f"facts{os.environ['RANK']}.json", "w") as file:
    json.dump(facts, file)
"""

HARD = ["a b", "--config", "x.yaml", "--", "-c", "'", '"', "new\nline", "$HOME $(id) `id`", "$$", "${local_rank}"]
HARD += ["ü→", ""]

TARGETS = {
    "script": ("", ["t.py"]),
    "hard-names": ("a b'c\n-\u00fc", ["./a b'c\n-\u00fc/t.py", *HARD]),
    "module": ("pack", ["-m", "pack.t", "--lr", "1"]),
    "package": ("app", ["-m", "app"]),
    "folder": ("dir", ["dir"]),
    "link": ("far", ["link.py"]),
    "fresh": ("", ["t.py", *HARD], "--launch.preload", "none"),
}


def compare(start, home, folder, target, *options) -> tuple[dict, dict]:
    """What the script sees under plain python, and on rank 1 of a launch; one target's imports torch itself."""
    place = home / folder
    place.mkdir(exist_ok=True)
    name = "__main__.py" if folder in ("app", "dir") else "t.py"
    (place / name).write_text(PROBE)
    (home / "link.py").symlink_to(place / name)
    is_module = target[0] == "-m"
    (home if is_module else place).joinpath("helper.py").write_text("")
    for module in ("types", "queue", "random", "torch") if folder and not is_module else ():
        (home / f"{module}.py").write_text("raise SystemExit('the current folder is not to be searched')")
    with (home / "out").open("w") as file:  # a file, as a rank that is not shown has
        command = [sys.executable, "-u", *target]
        plain = clean_environ() | {"OMP_NUM_THREADS": "1", "RANK": "9"}
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        subprocess.run(command, cwd=home, env=plain, check=True, **streams)
    is_cold = target == TARGETS["script"][1]
    run = start(None, *options, arguments=tuple(target), env={"XDG_RUNTIME_DIR": str(home)} if is_cold else {})
    assert run.end() == 0, run.stderr
    assert run.json("agent.json")["warm"] is not (is_cold or bool(options))
    alone, launched = (json.loads((home / f"facts{rank}.json").read_text()) for rank in (9, 1))
    return alone, launched


@pytest.fixture(scope="module")
def compared(side_by_side):
    return side_by_side(compare, TARGETS)


def differences(alone: dict, launched: dict) -> dict:
    return {name: (alone[name], launched[name]) for name in alone if alone[name] != launched[name]}


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "fresh"])
def test_script_sees_what_python_would_show_it(compared, target):
    assert differences(*compared[target].result()) == {}


def test_script_in_a_fresh_interpreter_sees_the_same(compared):
    # Only the bootstrap's own command line differs.
    assert set(differences(*compared["fresh"].result())) <= {"shown", "orig_argv"}


def test_argument_that_is_no_utf8_reaches_the_script(start, tmp_path):
    text = "import os, sys; open(f\"got{os.environ['RANK']}\", 'wb').write(os.fsencode(sys.argv[1]))"
    (tmp_path / "t.py").write_text(text)
    run = start(None, arguments=("t.py", b"\xff\xfe-\xc3"))
    assert run.end() == 0
    assert (tmp_path / "got1").read_bytes() == b"\xff\xfe-\xc3"


MANY = """
import multiprocessing as mp, os, sys
import torch
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)

class Squares(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return i * i, os.getpid()

def double(x): return 2 * x

def check(method):
    loader = DataLoader(Squares(), num_workers=1, multiprocessing_context=method, batch_size=2)
    values, pids = zip(*loader)
    assert torch.cat(values).tolist() == [0, 1, 4, 9], values
    assert os.getpid() not in torch.cat(pids).tolist()
    with mp.get_context(method).Pool(1) as pool:
        assert pool.map(double, [1, 2]) == [2, 4]

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    for method in (("fork", "spawn"), ("fork", "forkserver"))[rank]:
        check(method)
    assert mp.current_process().name == "MainProcess"
    print("all well", rank)
"""


def test_data_loaders_and_pools_work_with_every_start_method(launch):
    run = launch(MANY)
    assert run.code == 0, run.log(0, "stderr.log") + run.log(1, "stderr.log")
    assert (run.log(0), run.log(1)) == ("all well 0\n", "all well 1\n")


ENDINGS = """
import torch
import atexit, os, sys, threading, time, weakref
def note(text): os.write(1, (text + "\\n").encode())

class Last:
    def __init__(self): self.me = self
    def __del__(self): note("del in a cycle")

class Plain:
    def __del__(self): note("del")

atexit.register(note, "atexit 1")
atexit.register(lambda: note("atexit 2 " + str(sys.modules["__main__"].Plain is Plain)))
keep, cycle = Plain(), Last()
weakref.finalize(keep, note, "finalize")
unclosed = open("unclosed" + os.environ["RANK"], "w"); unclosed.write("flushed")
threading.Thread(target=lambda: (time.sleep(0.2), note("thread"))).start()
import ctypes
ctypes.CDLL(None).printf(b"c text that is not flushed\\n")
note("main ends")
if os.environ["RANK"] != "1": {end}
"""


ENDS = {
    "sys.exit(4)": 4,
    "raise KeyError('x')": 1,
    "sys.stdout = open('own' + os.environ['RANK'], 'w'); print('own')": 0,
    "sys.stdout = open('/dev/full', 'w'); print('lost')": 120,
}


def end_so(start, folder, end):
    text = ENDINGS.replace("{end}", end)
    run = start(text)
    environ = clean_environ() | {"RANK": "9"}
    command = [sys.executable, "-u", "t.py"]
    plain = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    run.end()
    return run, plain


@pytest.fixture(scope="module")
def endings(side_by_side):
    return side_by_side(end_so, {end: (end,) for end in ENDS})


@pytest.mark.parametrize("end", ENDS)
def test_end_of_a_script_is_that_of_an_interpreter(endings, end):
    run, plain = endings[end].result()
    assert plain.returncode == run.code == ENDS[end]
    assert run.log(0).splitlines() == plain.stdout.splitlines()
    assert (run.folder / "unclosed0").read_text() == "flushed"  # rank 1 may be stopped because of rank 0
    assert not (run.folder / "own0").exists() or (run.folder / "own0").read_text() == "own\n"


COMPILER = """
import torch._dynamo
try:
    import triton
except ImportError:
    pass
print("imported")
"""


def test_terminal_shows_nothing_of_how_the_compiler_ends(launch):
    run = launch(COMPILER, "--num-processes", "2", "--use-cpu", "--allow-unsharded", plain=False)
    assert (run.code, run.stdout) == (0, "imported\n")
    assert run.log(0, "stderr.log") == run.log(1, "stderr.log") == ""
    assert "leaked" not in run.stderr


SURROUNDINGS = """
import json, os, random, sys
lines = sys.stdin.read() if os.environ["RANK"] == "0" else ""
import torch, numpy
json.dump({
    "stdin": lines,
    "threads": torch.get_num_threads(),
    "numbers": [random.random(), numpy.random.rand(), torch.rand(1).item()],
    "cuda": [torch.cuda.is_initialized(), os.environ["CUDA_VISIBLE_DEVICES"]],
    "own": os.environ["MY_OWN"],
    "native": __import__("ctypes").CDLL(None).getenv(b"RANK") != 0,
}, open(f"seen{os.environ['RANK']}.json", "w"))
"""


def test_variables_standard_input_and_random_numbers(start, tmp_path):
    own = "launch.env={OMP_NUM_THREADS: 2, MY_OWN: 'a b'}"
    run = start(SURROUNDINGS, "--set", own, stdin=subprocess.PIPE)
    run.stdout, run.stderr = run.process.communicate("one\ntwo\n", timeout=120)
    assert run.process.returncode == 0, run.stderr
    first, second = (json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in range(2))
    assert first["stdin"] == "one\ntwo\n"
    assert (first["threads"], first["own"], first["native"]) == (2, "a b", True)
    assert first["numbers"][0] != second["numbers"][0]
    assert first["numbers"][1] != second["numbers"][1]
    assert first["numbers"][2] == second["numbers"][2]  # torch's seed is the same constant in every process
    assert first["cuda"] == [False, ""]


HANDLERS = """
import os, time
rank = os.environ["RANK"]
try:
    with open("up" + rank, "w") as file:  # a file that is only let go of swallows an interrupt while it is flushed
        file.write("y")
    time.sleep(60)
except KeyboardInterrupt:
    open("caught" + rank, "w").write("y")
    raise
finally:
    open("finally" + rank, "w").write("y")
"""


def test_interrupt_is_an_exception_in_the_script(start):
    run = start(HANDLERS)
    for rank in range(2):
        run.wait_for(f"up{rank}")
    run.signal(2)
    assert run.end() == 130
    assert run.json("agent.json")["warm"] is True
    assert run.wait_for("caught0", 1) == run.wait_for("finally1", 1) == "y"


FORKS = """
import os, sys, subprocess
pid = os.fork()
if pid == 0:
    print("child", flush=True)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
assert subprocess.run(["true"]).returncode == 0
os.execv(sys.executable, [sys.executable, "-c", "import sys; print('executed'); sys.exit(6)"])
"""


def test_script_may_fork_and_execute(launch):
    run = launch(FORKS)
    assert run.code == 6
    assert "child\nexecuted\n" in (run.log(0), run.log(1))  # the one that ends first has the other stopped


SETS = "import os; os.environ['FROM_IMPORT'] = str(os.getpid())\n"
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
COUNTING = "import ctypes; ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).abort)"
"""A library that looks at the interpreter's complete end whether its objects are gone, as nanobind's do."""
MODULES = {
    "fine": (
        SETS,
        "import os, sys; print('own_module' in sys.modules, os.environ['FROM_IMPORT'] != str(os.getpid()))",
    ),
    "reports": (COUNTING, "import own_module, sys; sys.exit(4)"),
    "fails": ("1 / 0", "print('ran')"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "import sys; print('torch' in sys.modules)"),
    "threads": (
        SETS + THREAD,
        "import os, sys; print('torch' in sys.modules, os.environ.get('FROM_IMPORT'))",
    ),
}


def preload(start, folder, module, script):
    (folder / "own_module.py").write_text(module)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    run = start(script, "--launch.preload", "own_module", env={"PYTHONPATH": path})
    run.end()
    return run


@pytest.fixture(scope="module")
def preloaded(side_by_side):
    return side_by_side(preload, MODULES)


@pytest.mark.parametrize(
    ("module", "code", "printed", "said"),
    [
        ("fine", 0, "True True\n", "finished in"),
        ("reports", 4, "", "failed with exit code 4"),
        ("fails", 0, "ran\n", "importing own_module failed (ZeroDivisionError: division by zero)"),
        ("crashes", 1, "", "importing the modules of launch.preload ended the interpreter (SIGSEGV)"),
        ("threads", 0, "False None\n", "importing own_module started threads"),
    ],
)
def test_preloaded_module_is_there_or_costs_the_warm_start_only_unless_it_crashes(
    preloaded, module, code, printed, said
):
    run = preloaded[module].result()
    assert (run.code, run.stdout) == (code, printed)
    assert said in run.stderr
