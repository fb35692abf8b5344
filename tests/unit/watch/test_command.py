"""`fsdplaunch watch` without a terminal: lines of a log, snapshots as JSON, until the run has ended."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplaunch.cli.app import run
from fsdplaunch.run_dir import rank_folder
from fsdplaunch.watch import command
from tests.fake_runs import even, make_run, slow, write_steps

LAUNCHER = """
import sys
from pathlib import Path
from tests.fake_runs import make_run, slow
make_run(Path("runs"), ranks=4, times=slow(3), runs=True, age=9.0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """A process that is a run's launcher, until it is killed."""
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {LAUNCHER.strip()}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_once_as_json_is_one_snapshot(tmp_path, capsys):
    make_run(tmp_path / "runs", ranks=4, times=slow(2))
    assert run(["watch", "--json", "--once", "--log-dir", str(tmp_path / "runs")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "done"
    assert (found["step"], found["bound_by"]) == (40, "straggler")
    assert found["slowest"] == {"rank": 2, "cause": "compute", "factor": pytest.approx(3.0)}
    assert [set(row) for row in found["ranks"]] == [
        {"rank", "step", "step_seconds", "data_seconds", "peer_seconds", "memory_bytes", "peak_bytes"}
    ] * 4


def test_run_that_has_ended_is_one_line_and_the_end(tmp_path, capsys):
    make_run(tmp_path / "runs")
    assert run(["watch", "ab12", "--log-dir", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out == (
        "done, 2 m 05 s, step 40, 100.0 ms a step, 10 steps/s, 160 samples/s, 1 % waiting for data,"
        " 20 % waiting for others, memory up to 1.1 GiB; the step is compute-bound\n"
    )


def test_run_that_is_killed_is_told_ended_within_seconds(tmp_path, launcher):
    watch = [sys.executable, "-m", "fsdplaunch", "watch", "--log-dir", str(tmp_path / "runs")]
    with (
        subprocess.Popen([*watch, "--json"], stdout=subprocess.PIPE, text=True) as stream,
        subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as lines,
    ):
        assert json.loads(stream.stdout.readline())["state"] == "running"
        assert lines.stdout.readline().startswith("running, ")
        launcher.kill()
        said, told = stream.communicate(timeout=20)[0], lines.communicate(timeout=20)[0]
    last = json.loads(said.splitlines()[-1])
    assert (last["state"], last["slowest"]["rank"]) == ("lost: its launcher is gone", 3)
    assert told.startswith("lost: its launcher is gone")
    assert len(told.splitlines()) == 1


def test_every_snapshot_is_a_line_with_the_steps_of_that_moment(tmp_path, monkeypatch, capsys):
    run_dir = make_run(tmp_path / "runs", runs=True)
    naps = []

    def nap(seconds):
        naps.append(seconds)
        for rank in range(2):
            write_steps(rank_folder(run_dir, rank), rank, 40 + len(naps), even)
        if len(naps) == 3:
            (run_dir / "result.json").write_text('{"exit_code": 0}')

    monkeypatch.setattr(command.time, "sleep", nap)
    monkeypatch.setattr("fsdplaunch.watch._STATE_SECONDS", -1.0)
    monkeypatch.setattr(command, "LOOK_SECONDS", 1e-9)
    assert run(["watch", "--json", "--log-dir", str(tmp_path / "runs")]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found[0]["step"] == 40
    assert (found[-1]["step"], found[-1]["state"]) == (43, "done")
    assert len(found) >= 2


def test_last_lines_are_shown_without_tokens(tmp_path):
    run_dir = make_run(tmp_path)
    (run_dir / "ranks/1/stderr.log").write_text("a\nlogging in with hf_abcdefghijkl\n\n")
    watcher = command.RunWatcher(command.find_run(tmp_path))
    assert watcher.last_line(0) == "loss 0.5"
    assert watcher.last_line(1) == "logging in with ***"
    assert watcher.last_line(7) == ""
