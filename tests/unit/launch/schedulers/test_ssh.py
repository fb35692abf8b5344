"""The ssh clients of a run and their remote sides, without ssh: who ends, who goes on, what gets through."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from io import FileIO
from pathlib import Path

import pytest

from fsdplaunch.cli import ssh_remote
from fsdplaunch.config.layers import SetValue
from fsdplaunch.config.problems import TextPosition
from fsdplaunch.config.schema.config import Config
from fsdplaunch.launch.schedulers.ssh import READY, SessionSpec, SshHost, SshSession, SshSessions, contradictions

UP = f"echo '{READY}' >&2;"
UNTIL_HUNG_UP = f"{UP} cat > /dev/null"


def run(
    *scripts: str, needed: int | None = None, start: float = 10
) -> tuple[SshSession | None, SshSessions, list[str]]:
    """Start a shell for each machine a, b, c; return who ended the run, the sessions, and what was shown."""
    shown: list[str] = []
    sessions = SshSessions(
        lambda host, text: shown.append(f"{host}: {text}"), needed=needed or len(scripts), beat_seconds=0.1
    )
    for host, script in zip("abc", scripts, strict=False):
        sessions.start(SessionSpec(host=host, words=["sh", "-c", script], task={}))
    try:
        return sessions.wait(start_seconds=start, end_seconds=0.3), sessions, shown
    finally:
        sessions.hang_up()
        sessions.kill()


def test_nodes_that_end_well_end_the_run_well():
    bad, _, shown = run(f"{UP} echo hello >&2", UP)
    assert bad is None
    assert shown == ["a: hello"]


def test_first_failure_is_the_runs_and_the_others_are_hung_up():
    bad, sessions, _ = run(UNTIL_HUNG_UP, f"{UP} exit 7")
    assert bad is sessions.clients[1]
    assert [client.process.returncode for client in sessions.clients] == [0, 7]


@pytest.mark.parametrize(
    ("first", "second", "start"),
    [("sleep 60", "echo 'ssh: no route' >&2; exit 255", 10), (UNTIL_HUNG_UP, "sleep 600", 0.3)],
    ids=["refuses", "says nothing"],
)
def test_node_that_does_not_start_ends_the_start_of_the_others(first: str, second: str, start: float):
    bad, sessions, _ = run(first, second, start=start)
    assert bad is sessions.clients[1]
    assert (bad.lines == ["ssh: no route"], bad.late) == (start == 10, start < 1)
    assert sessions.clients[0].process.returncode == (-signal.SIGKILL if start == 10 else 0)


def test_elastic_run_goes_on_without_a_node_while_enough_are_left():
    bad, _, shown = run(f"{UP} sleep 1", f"{UP} sleep 1", f"{UP} exit 255", needed=2)
    assert bad is None
    assert shown == ["c: the connection was lost; 2 nodes go on"]


@pytest.mark.parametrize("dead", [(0,), (1, 2)], ids=["first", "too-few"])
def test_elastic_run_ends_without_its_first_node_or_with_too_few(dead: tuple[int, ...]):
    scripts = [f"{UP} exit 255" if number in dead else UNTIL_HUNG_UP for number in range(3)]
    bad, sessions, _ = run(*scripts, needed=2)
    assert bad in [sessions.clients[number] for number in dead]
    assert bad.process.returncode == 255


def test_far_side_hears_signals_and_that_we_are_there(tmp_path: Path):
    heard = tmp_path / "heard"
    sessions = SshSessions(lambda _host, _text: None, needed=1, beat_seconds=0.1)
    words = ["sh", "-c", f"{UP} head -n 4 > {heard}"]
    task = {"argv": ["a\nb"], "env": {"A": "1"}}
    sessions.start(SessionSpec(host="a", words=words, task=task, secrets={"HF_TOKEN": "t"}))
    sessions.signal(signal.SIGTERM)
    assert sessions.wait(start_seconds=10, end_seconds=1) is None
    assert [json.loads(line) for line in heard.read_text().splitlines()] == [
        {"argv": ["a\nb"], "env": {"A": "1", "HF_TOKEN": "t"}},
        {"signal": 15},
        {},
        {},
    ]


@pytest.mark.parametrize("end", ["closed", "silent"])
def test_far_side_ends_its_part_when_the_near_side_has_gone(monkeypatch, end: str):
    sent: list[int] = []
    monkeypatch.setattr(ssh_remote, "signal_self", sent.append)
    monkeypatch.setattr(ssh_remote, "KILL_AFTER_SECONDS", 0.0)
    reader, writer = os.pipe()
    orders = FileIO(reader)
    watch = threading.Thread(target=ssh_remote.obey, args=(orders, 0.0, 1.5))
    watch.start()
    for word in ({"signal": signal.SIGUSR1}, {}, {}):
        os.write(writer, json.dumps(word).encode() + b"\n")
        time.sleep(0.6)  # together longer than the silence it bears
        assert sent == [signal.SIGUSR1]
    if end == "closed":
        os.close(writer)
    watch.join(5)
    assert sent == [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]
    orders.close()
    if end == "silent":
        os.close(writer)


def test_far_side_takes_nothing_of_the_login_shells_configuration(tmp_path: Path):
    order = {
        "argv": ["launch", "--no-python", "--dry-run", "true"],
        "folder": str(tmp_path),
        "env": {"FSDPLAUNCH_MACHINE_RANK": "0"},
        "config_file": "runs/r1/config.yaml",
        "config": "num_machines: 1\n",
        "grace": 1,
        "silence": 60,
    }
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4]), "FSDPLAUNCH_LAUNCH_ROLE": "theirs"}
    words = [sys.executable, "-P", "-m", "fsdplaunch.cli.ssh_remote"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, env=environ, text=True, **pipes) as there:
        print(json.dumps(order), file=there.stdin, flush=True)
        out, err = there.stdout.read(), there.stderr.read()
        assert there.wait(60) == 0, err
    assert err.startswith(READY)
    assert "--role=default" in out
    assert (tmp_path / "runs" / "r1" / "config.yaml").read_text() == "num_machines: 1\n"


def test_file_of_a_launcher_that_always_says_one_node_goes_with_a_list():
    file = SetValue(value=None, layer="file", place=TextPosition(source="fsdp.yaml", line=3))
    origins = dict.fromkeys([("num_machines",), ("machine_rank",), ("num_processes",)], file)
    config = Config(num_machines=1, machine_rank=0, num_processes=8)
    assert not list(contradictions(config, [SshHost(name="a"), SshHost(name="b")], origins))
