"""A warm interpreter, here one without torch: what it takes over, whom it serves, when it ends."""

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsdplaunch.channel import Channel
from fsdplaunch.warm import connect, opened_folder, socket_names
from fsdplaunch.warm.client import ask_all, warm_agent

PR_SET_THP_DISABLE = 41
MODULES = [["own_module"], []]
MODULE = """
import json, os, sys, types
class Generator:  # as torch has one, which importing seeds by chance
    def seed(self):
        self.value = os.urandom(8).hex()
sys.modules["torch"] = types.SimpleNamespace(default_generator=Generator())
sys.modules["torch"].default_generator.seed()
OWN = os.environ.get("READ_BY_IMPORT")
for name, value in os.environ.items():
    pass
print("hello")
"""
SERVE = """
import json, multiprocessing, os, signal, sys, tempfile, time
from fsdplaunch.warm.import_record import ImportRecord
from fsdplaunch.warm.server import WarmServer
from fsdplaunch.warm import folder_path
from fsdplaunch.warm import server_name
tempfile.gettempdir()  # as an agent does, for itself
record = ImportRecord()
with record.noting():
    import own_module
name = server_name(sys.executable, [["own_module"], []], record.environ_before, folder=os.getcwd())
server = WarmServer(folder_path(os.environ), name, record, float(sys.argv[1]), {"modules": ["own_module"]})
print("ready", flush=True)
os.chdir("/")
tempfile.gettempdir()
server.serve()
record.give_again()
print(json.dumps({"argv": sys.argv, "cwd": os.getcwd(), "own": os.environ.get("OWN"), "tasks": os.getpid(),
                  "session": os.getsid(0), "files": len(os.listdir("/proc/self/fd")),
                  "seed": sys.modules["torch"].default_generator.value,
                  "temporary": tempfile.gettempdir(),
                  "spawned from": multiprocessing.process.ORIGINAL_DIR}), flush=True)
sys.stdin.read()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def environ(tmp_path):
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    (tmp_path / "own_module.py").write_text(MODULE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    return {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(runtime)}


@contextmanager
def serving(environ, seconds=20.0, **popen):
    command = [sys.executable, "-c", SERVE, str(seconds)]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, **popen)
    try:
        assert [process.stdout.readline(), process.stdout.readline()] == ["hello\n", "ready\n"]
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def launched(environ, code=0, keep_seconds=0.0):
    """Give the agent and the ends of its streams; None where the launch would be a cold one."""
    stdin, there = os.pipe()
    here, stdout = os.pipe()
    lifeline, held = os.pipe()
    agent = warm_agent(
        [sys.executable, "-u", "main.py", str(code)],
        environ,
        MODULES,
        Path.cwd(),
        [stdin, stdout, stdout, lifeline],
        keep_seconds=keep_seconds,
        blocked=[],
        lost_status=lambda: -99,
    )
    for end in (stdin, stdout, lifeline):
        os.close(end)
    with os.fdopen(here) as said, os.fdopen(there, "w") as typed:
        yield agent, said, typed, held


@contextmanager
def only_socket(environ):
    """Give the opened folder with the sockets, and the name of the only one."""
    with opened_folder(environ["XDG_RUNTIME_DIR"] + "/fsdplaunch_warm") as folder:
        (name,) = socket_names(folder)
        yield folder, name


def is_cold(environ):
    with launched(environ) as (agent, _, _, held):
        os.close(held)
        if agent is not None:
            agent.kill()
        return agent is None


def test_agent_is_what_the_launch_says_and_its_status_comes_back(environ, tmp_path, monkeypatch):
    (tmp_path / "place").mkdir()
    with serving(environ) as server:
        # In another folder, with another variable, for which the imports have no use.
        monkeypatch.chdir(tmp_path / "place")
        with launched(environ | {"OWN": "a", "TMPDIR": str(tmp_path)}, code=7) as (agent, said, typed, _):
            assert said.readline() == "hello\n"  # what importing printed is printed again
            seen = json.loads(said.readline())
            assert (seen["cwd"], seen["own"], seen["argv"]) == (str(tmp_path / "place"), "a", ["main.py", "7"])
            assert seen["spawned from"] == str(tmp_path / "place")
            assert seen["temporary"] == str(tmp_path)
            assert seen["tasks"] == seen["session"] == agent.pid
            assert seen["files"] == 5  # streams, lifeline, and the one that lists them
            typed.close()
            assert agent.wait() == 7
        with launched(environ) as (agent, said, _, _):
            said.readline()
            assert json.loads(said.readline())["seed"] != seen["seed"]
            agent.send_signal(signal.SIGTERM)
            assert agent.wait() == -signal.SIGTERM
        assert server.poll() is None
        assert ask_all(environ, {"state": True})[0]["served"] == 2


def test_status_is_read_elsewhere_where_the_interpreter_was_killed(environ):
    with serving(environ) as server, launched(environ) as (agent, said, typed, _):
        said.readline()
        server.kill()
        server.wait()
        typed.close()
        assert agent.wait() == -99
        with only_socket(environ) as (folder, _):
            assert ask_all(environ, {"state": True}) == []
            assert socket_names(folder) == []  # whoever looks removes what is dead


def test_variable_with_a_say_in_imports_makes_a_cold_launch(environ):
    names = ("READ_BY_IMPORT", "JSON_SETTING", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "TORCH_ANYTHING", "TZ")
    with serving(environ):
        for name in names:
            assert is_cold(environ | {name: "3"}), name
        assert not is_cold(environ | {"UNREAD": "1"})


@pytest.mark.parametrize("where", ["a changed module", "a folder of PYTHONPATH", "the user's own, its first"])
def test_what_is_imported_or_installed_anew_makes_a_cold_launch_and_ends_the_interpreter(
    environ, tmp_path, monkeypatch, where
):
    environ["PYTHONUSERBASE"] = str(tmp_path / "user")
    folder = tmp_path
    if where == "the user's own, its first":
        monkeypatch.setattr(sys, "executable", sys._base_executable)  # virtual environments have none
        folder = Path(sysconfig.get_path("purelib", "posix_user", vars={"userbase": str(tmp_path / "user")}))
    with serving(environ) as server:
        if where == "a changed module":
            os.utime(tmp_path / "own_module.py", ns=(1, 1))
        else:
            (folder / "other-1.0.dist-info").mkdir(parents=True)
        assert is_cold(environ)
        assert server.wait(10) == 0


def test_process_that_inherits_otherwise_gets_a_cold_launch(environ):
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]
    conditions = {
        "nice": lambda: os.nice(1),
        "affinity": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
        "stack": lambda: resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, most)),
        "huge pages": lambda: ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0),
    }
    with serving(environ):
        for name, condition in conditions.items():
            pid = os.fork()
            if pid == 0:
                try:
                    condition()
                    os._exit(0 if is_cold(environ) else 1)
                except BaseException:
                    os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, name


def test_garbage_gets_no_answer_and_does_no_harm(environ):
    with serving(environ) as server:
        with only_socket(environ) as (folder, name):
            for data in (
                b"",
                b"\xff" * 4,
                b"\0\0\0\5hello",
                b"\0\0\0\2[]",
                b"\0\3\0\0" + b"[" * 196_608,
                b'\0\0\0\x0c{"launch":1}',
            ):
                with connect(folder, name) as end:
                    end.sendall(data)
                    end.shutdown(socket.SHUT_WR)
                    end.settimeout(5)
                    end.recv(9)
        assert not is_cold(environ)
        assert server.poll() is None


def test_launcher_that_says_no_more_leaves_no_agent(environ):
    with serving(environ) as server:
        with only_socket(environ) as (folder, name):
            end = connect(folder, name)
        from fsdplaunch.warm import PROTOCOL, handed_over, surroundings

        request = {
            "launch": PROTOCOL,
            "argv": [sys.executable, "-u", "m", "0"],
            "environ": environ,
            "keep_seconds": 0,
        }
        request |= {"surroundings": surroundings(), "handed_over": handed_over(), "blocked": []}
        reading, writing = os.pipe()
        Channel(end).send(request, [os.open("/", os.O_PATH), 0, writing, writing, reading])
        os.close(writing)
        answer, _ = Channel(end).receive()
        end.close()
        assert os.read(reading, 9) == b""  # it has ended without a word
        deadline = time.monotonic() + 5
        while Path(f"/proc/{answer['pid']}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not Path(f"/proc/{answer['pid']}").exists()
        assert ask_all(environ, {"state": True})[0]["pid"] == server.pid


@pytest.mark.skipif(os.geteuid() != 0, reason="being another user takes root")
def test_another_user_is_served_neither_through_the_folder_nor_with_an_open_one(environ):
    with serving(environ):
        folder_name = environ["XDG_RUNTIME_DIR"] + "/fsdplaunch_warm"
        with only_socket(environ) as (folder, name):
            pid = os.fork()
            if pid == 0:
                os.setuid(65534)
                try:
                    list(Path(folder_name).iterdir())
                    os._exit(1)
                except PermissionError:
                    pass
                end = socket.socket(socket.AF_UNIX)
                try:
                    end.connect(f"/proc/self/fd/{folder}/{name}.sock")
                except PermissionError:
                    os._exit(0)
                os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            Path(folder_name, f"{name}.sock").chmod(0o777)
            end = socket.socket(socket.AF_UNIX)
            pid = os.fork()
            if pid == 0:
                os.fchdir(folder)  # an open folder, as a careless program may hand it on
                Path(folder_name).chmod(0o755)
                os.setuid(65534)
                try:
                    end.connect(f"{name}.sock")
                    Channel(end).send({"state": True})
                    os._exit(0 if Channel(end).receive() is None else 1)
                except OSError:
                    os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_it_ends_when_its_time_is_over_and_when_it_cannot_be_found(environ, tmp_path):
    with serving(environ, seconds=0.1) as server:
        assert server.wait(10) == 0
        assert not list((tmp_path / "runtime" / "fsdplaunch_warm").iterdir())
    with serving(environ) as server:
        next((tmp_path / "runtime" / "fsdplaunch_warm").iterdir()).unlink()  # as a logout does
        assert server.wait(10) == 0
    with serving(environ) as server:
        server.terminate()
        assert server.wait(10) == 0
        assert not list((tmp_path / "runtime" / "fsdplaunch_warm").iterdir())
