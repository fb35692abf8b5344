"""The pure parts of a trial: the folder it runs in, what its ranks recorded, why it failed."""

from math import nan
from types import SimpleNamespace

import pytest

from fsdplaunch.launch.plan import LaunchTarget
from fsdplaunch.launch.run_result import Failure, RunResult
from fsdplaunch.step_record import RankSteps, Step, StepWriter
from fsdplaunch.tune import trial
from fsdplaunch.tune.trial import WARM_UP, make_scratch, read_measured

MIB = 1024**2


def test_scratch_reads_as_the_users_folder(tmp_path):
    user = tmp_path / "user"
    (user / "pkg").mkdir(parents=True)
    (user / "runs" / "a").mkdir(parents=True)
    (user / ".git").mkdir()
    (user / "train.py").write_text("import pkg")
    (user / "pkg" / "big.bin").write_bytes(bytes(2 * MIB))
    (user / "gone").symlink_to(user / "nowhere")
    target = user / "runs" / "a" / "work"
    make_scratch(user, target, leave_out=(user / "runs", user / "runs" / "a"))
    assert {path.name for path in target.iterdir()} == {"pkg", ".git", "train.py", "gone"}
    assert not (target / "train.py").is_symlink()
    assert (target / "pkg" / "big.bin").resolve() == user / "pkg" / "big.bin"
    (target / "pkg" / "new").write_text("x")
    (target / "train.py").write_text("changed")
    assert not (user / "pkg" / "new").exists()
    assert (user / "train.py").read_text() == "import pkg"


def test_copies_take_no_more_room_than_they_may_and_the_folder_does_not_show_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "_ALL_COPIED_BYTES", 10)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("12345678"[: 8 if name != "c" else 2])
    target = tmp_path / "t-tune" / "work"
    make_scratch(tmp_path, target, leave_out=(tmp_path / "t-tune", tmp_path))
    assert {path.name: path.is_symlink() for path in target.iterdir()} == {"a": False, "b": True, "c": False}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("train.py", "train.py"),
        ("../train.py", "{parent}/train.py"),
        ("{source}/train.py", "{work}/train.py"),
        ("/opt/train.py", "/opt/train.py"),
    ],
)
def test_a_script_is_found_from_the_scratch_folder(tmp_path, name, wanted):
    source, work = tmp_path / "user", tmp_path / "user" / "runs" / "work"
    work.mkdir(parents=True)
    (work / "train.py").write_text("")
    places = {"parent": tmp_path, "source": source, "work": work}
    arguments = (f"--out={source}/out", f"{source}", f"/data{source}/x", f"{source}ow", "--lr")
    target = LaunchTarget(name=name.format(**places), arguments=arguments)
    runner = trial.TrialRunner(
        plan=lambda *_: None, target=target, folder=work.parent, source=source, limit_seconds=1.0, guarded=True
    )
    found = runner._target_in(work)
    assert found.name == wanted.format(**places)
    assert found.arguments == (f"--out={work}/out", f"{work}", *arguments[2:])


def record(seconds, memory=100.0):
    """Return the record of a rank whose steps after the first took so long."""
    steps = [Step(number, 0.0, each, peak_bytes=memory) for number, each in enumerate([nan, *seconds], 1)]
    return RankSteps(1, len(steps), 0.0, steps, [])


def test_the_slowest_rank_counts_and_the_first_steps_do_not():
    first, second = [9.0] * (WARM_UP - 1), [1.0, 2.0, 3.0]
    found = read_measured([record([*first, *second]), record([9.0, 9.0, 2.0, 1.0, 1.0], 300)], 3)
    assert found.seconds == (2.0, 2.0, 3.0)
    assert found.memory == 300


def test_a_script_that_ends_too_early_is_no_measurement():
    found = read_measured([record([1.0, 1.0]), None], 10)
    assert found.failure == "the script ended after no optimizer step, 13 are needed"
    assert "after 3 optimizer steps, 13 are needed" in read_measured([record([1.0, 1.0])], 10).failure
    assert len(read_measured([record([1.0] * 8)], 10).seconds) == 6


def test_a_launch_is_over_when_its_time_is_up_or_a_script_does_not_end(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(trial.time, "monotonic", lambda: now[0])
    plan = SimpleNamespace(run_dir=tmp_path, workers=2)
    watch, hurried = trial._Watch(plan, 300.0, steps=2), trial._Watch(plan, 5.0, steps=2)
    for folder in watch.folders:
        folder.mkdir(parents=True)
    writers = [StepWriter(folder) for folder in watch.folders]
    for writer in (writers[0], writers[0], writers[1]):
        writer.count(1.0)
    assert not watch.is_over()
    assert not watch.is_measured
    writers[1].count(1.0)
    assert not watch.is_over()
    now[0] = 9.0
    assert not watch.is_over()
    assert hurried.is_over()
    now[0] = 10.0
    assert watch.is_over()
    assert (watch.is_measured, watch.has_ended) == (True, True)


def failed(**values):
    failure = Failure(**{"rank": 1, "exit_code": 1, **values})
    return RunResult(exit_code=failure.exit_code, seconds=1.0, failure=failure)


@pytest.mark.parametrize(
    ("result", "wanted"),
    [
        (failed(message="torch.OutOfMemoryError: CUDA out of memory. Tried ..."), ("memory", "out of memory")),
        (failed(exit_code=137, signal="SIGKILL"), ("memory", "out of host memory: killed")),
        (failed(message="WriteRefusedError: /a is outside"), ("write", "/a is outside")),
        (failed(message="ValueError: bad\nmore"), ("error", "rank 1: ValueError: bad")),
        (failed(tail=("first", "last words", "")), ("error", "rank 1: last words")),
        (RunResult(exit_code=130, seconds=1.0, stopped_by="SIGINT"), ("stopped", "stopped by SIGINT")),
    ],
)
def test_a_failed_launch_says_why(result, wanted):
    assert trial._why(result) == wanted
