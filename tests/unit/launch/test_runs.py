"""The list of runs: states read from the folders alone, and from the processes that are still there."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdplaunch.errors import UsageError
from fsdplaunch.launch import runs
from fsdplaunch.launch.runs import LogTail, cancel, find_run, log_files, read_runs, status_of, write_job
from fsdplaunch.run_dir import JOB


def make(folder: Path, name: str, *, result: dict | None = None, job: dict | None = None, at: int = 0) -> Path:
    run_dir = folder / name
    run_dir.mkdir(parents=True)
    (run_dir / "plan.json").write_text(json.dumps({"script": "t.py"}))
    if at:
        os.utime(run_dir / "plan.json", (at, at))
    if result is not None:
        (run_dir / "result.json").write_text(json.dumps({"stopped_by": None} | result))
    if job is not None:
        (run_dir / JOB).write_text(json.dumps(job))
    return run_dir


def state(run_dir: Path) -> tuple[str, bool]:
    run = find_run(run_dir.parent, run_dir.name)
    return run.state, run.unfinished


def test_run_that_has_ended_says_how(tmp_path: Path):
    stopped = {"exit_code": 75, "stopped_by": "SIGTERM"}
    ends = {"done": {"exit_code": 0}, "failed (7)": {"exit_code": 7}, "stopped by SIGTERM": stopped}
    for number, (words, result) in enumerate(ends.items()):
        assert state(make(tmp_path, f"r{number}", result=result)) == (words, False)


def test_run_whose_launcher_lives_runs_and_can_be_cancelled(tmp_path: Path):
    run_dir = make(tmp_path, "r1")
    text = f"""
import sys, time
sys.path.insert(0, {str(Path.cwd())!r})
from pathlib import Path
from fsdplaunch.launch.runs import write_job
write_job(Path({str(run_dir)!r}), route="here")
print("ready", flush=True)
time.sleep(60)
"""
    launcher = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    launcher.stdout.readline()
    assert state(run_dir) == ("running", True)
    assert str(launcher.pid) in cancel(find_run(tmp_path, "r1"))
    assert launcher.wait(10) == -15
    assert state(run_dir) == ("lost: its launcher is gone", False)
    with pytest.raises(UsageError, match="r1 is not running"):
        cancel(find_run(tmp_path, "r1"))


def test_another_process_of_the_same_number_or_of_another_machine_is_not_the_launcher(tmp_path: Path):
    run_dir = make(tmp_path, "r1")
    write_job(run_dir, route="here")
    assert state(run_dir) == ("running", True)
    os.utime(run_dir / "plan.json", (0, 0))  # as after a clock that was set right since
    assert find_run(tmp_path, "r1").seconds < 10**5
    job = json.loads((run_dir / JOB).read_text())
    (run_dir / JOB).write_text(json.dumps(job | {"since": job["since"] - 1}))
    assert state(run_dir) == ("lost: its launcher is gone", False)
    elsewhere = {"route": "here", "host": "elsewhere", "pid": os.getpid(), "since": 1}
    assert state(make(tmp_path, "r2", job=elsewhere)) == ("started on elsewhere", True)


def test_slurm_run_without_slurm_is_known_by_its_last_start(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    run_dir = make(tmp_path, "r1", job={"route": "slurm", "job": "12"})
    assert state(run_dir) == ("unknown to SLURM", False)
    for number, code in enumerate((75, 0)):
        make(run_dir, f"try{number}", result={"exit_code": code})
    assert state(run_dir) == ("done", False)


def test_slurm_run_that_goes_on_has_taken_time_since_its_start(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(runs.slurm, "job_states", lambda _job: {"": "RUNNING"})
    run_dir = make(tmp_path, "r1", job={"route": "slurm", "job": "12"}, at=int(time.time()) - 500)
    assert state(run_dir) == ("running", True)
    assert find_run(tmp_path, "r1").seconds == pytest.approx(500, abs=60)


def test_runs_are_listed_newest_first_without_latest(tmp_path: Path):
    for number in range(3):
        make(tmp_path, f"r{number}", result={"exit_code": 0}, at=1000 + number)
    (tmp_path / "latest").symlink_to("r2")
    (tmp_path / "notes").mkdir()
    assert [run.id for run in read_runs(tmp_path)] == ["r2", "r1", "r0"]
    assert [run.id for run in read_runs(tmp_path, limit=1)] == ["r2"]


def test_run_is_found_by_the_beginning_or_the_end_of_its_name(tmp_path: Path):
    for name in ("2026-01-01_a1", "2026-01-02_b2"):
        make(tmp_path, name)
    (tmp_path / "latest").symlink_to("2026-01-02_b2")
    assert find_run(tmp_path, "a1").id == "2026-01-01_a1"
    assert find_run(tmp_path, "latest").id == "2026-01-02_b2"
    for name, said in (("2026", "2 runs"), ("c3", "no run")):
        with pytest.raises(UsageError, match=said):
            find_run(tmp_path, name)


def test_logs_of_a_rank_are_found_on_whichever_machine_and_start_it_was(tmp_path: Path):
    run_dir = make(tmp_path, "r1", job={"route": "slurm", "job": "12"})
    (run_dir / "slurm-12.out").write_text("shown\n")
    for place in ("try0/node1", "try1"):
        log = run_dir / place / "ranks" / "3" / "stdout.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"{place}\n")
        os.utime(log, (1000 + len(place), 1000 + len(place)))
    run = find_run(tmp_path, "r1")
    tail = LogTail()
    assert tail.read(log_files(run, rank=None, stream="stdout")) == b"shown\n"
    assert tail.read(log_files(run, rank=3, stream="stdout")) == b"try1\ntry0/node1\n"
    assert tail.read(log_files(run, rank=3, stream="stdout")) == b""


@pytest.fixture
def array(tmp_path: Path, monkeypatch) -> Path:
    """A run of four tasks: one has ended, one has failed, one runs, one waits."""
    lines = "'12_0|COMPLETED|None' '12_1|FAILED|NonZeroExitCode' '12_2|RUNNING|None' '12_3|PENDING|Resources'"
    (tmp_path / "bin").mkdir()
    programs = {"squeue": f"printf '%s\\n' {lines}", "scancel": f'echo "$@" > {tmp_path}/cancelled'}
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    run_dir = make(tmp_path / "runs", "r1", job={"route": "slurm", "job": "12"})
    for task, code in ((0, 0), (1, 7)):
        make(run_dir, f"task{task}/try0", result={"exit_code": code})
        (run_dir / f"slurm-12_{task}.out").write_text(f"from {task}\n")
    return run_dir


def test_array_is_one_run_that_counts_its_tasks(array: Path, tmp_path: Path, monkeypatch):
    run = find_run(array.parent, "r1")
    assert (run.state, run.unfinished) == ("1 done, 1 failed (7), 1 running, 1 pending (Resources)", True)
    assert status_of(run) == 7
    assert LogTail().read(log_files(run, rank=None, stream="stdout")) == b"from 0\nfrom 1\n"
    cancel(run)
    assert (tmp_path / "cancelled").read_text() == "12\n"
    monkeypatch.setenv("PATH", "")  # SLURM has forgotten it
    run = find_run(array.parent, "r1")
    assert (run.state, run.unfinished) == ("1 done, 1 failed (7)", False)


@pytest.mark.parametrize(
    "job",
    [
        {"route": "slurm", "job": "--me"},
        {"route": "slurm", "job": 12},
        {"route": "kubernetes", "kind": "job", "name": "--all"},
        {"route": "kubernetes", "kind": "job", "name": "a", "namespace": "--all-namespaces"},
        {"route": "here", "host": socket.gethostname(), "pid": "1", "since": None},
        {"route": "here", "host": socket.gethostname(), "pid": -1, "since": None},
        {"route": ["here"], "host": "x", "pid": 5},
        {"route": "here"},
    ],
)
def test_what_no_launcher_writes_is_not_believed(tmp_path: Path, job: dict):
    assert state(make(tmp_path, "r1", job=job)) == ("unknown", False)
    with pytest.raises(UsageError, match="r1 is not running"):
        cancel(find_run(tmp_path, "r1"))


def test_broken_run_does_not_hide_the_others(tmp_path: Path):
    make(tmp_path, "good", result={"exit_code": 0})
    for number, text in enumerate(("[" * 100_000, "[]", '{"exit_code": "0"}', "\x00")):
        folder = make(tmp_path, f"bad{number}")
        (folder / "result.json").write_text(text)
        (folder / JOB).write_text(text)
    os.mkfifo(make(tmp_path, "pipe") / "result.json")
    assert {run.id: run.state for run in read_runs(tmp_path)}["good"] == "done"
    assert len(read_runs(tmp_path)) == 6
    folder = tmp_path / "good" / "ranks" / "0"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "stdout.log")  # which is not waited for
    assert LogTail().read(log_files(find_run(tmp_path, "good"), rank=0, stream="stdout")) == b""
