"""`fsdplaunch runs`: the list, the latest run's output, and old runs that are deleted."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from fsdplaunch.cli.app import run
from fsdplaunch.launch import runs as launch_runs
from fsdplaunch.launch.secret_variables import hide_in_words
from tests.fake_runs import make_run


def age(run_dir: Path, days: float) -> None:
    """Have nothing in a run's folder changed for so long."""
    at = time.time() - days * 86400
    for place, folders, files in os.walk(run_dir):
        for name in (*folders, *files):
            os.utime(Path(place) / name, (at, at), follow_symlinks=False)
    os.utime(run_dir, (at, at))


def pruned(capsys, *words: str) -> list[str]:
    assert run(["runs", "prune", "--yes", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)["deleted"]


def test_list_has_a_line_for_each_run_that_fits_80_columns(tmp_path, capsys):
    make_run(tmp_path / "runs", ranks=8, steps=1200, result={"seconds": 7440.0})
    make_run(tmp_path / "runs", "2026-01-02_030405-cd34", runs=True, age=200.0)
    assert run(["runs"]) == 0
    head, running, done = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "age", "took", "workers", "steps", "step", "state", "script"]
    assert " ".join(done.split()) == "2026-01-02_030405-ab12 60 m 2 h 8 1200 100.0 ms done train.py"
    assert running.split()[1:3] == ["3", "m"]
    assert " 2 40 100.0 ms running train.py" in " ".join(running.split())
    assert max(map(len, (head, running, done))) <= 80
    assert run(["runs", "--json"]) == 0
    newest = json.loads(capsys.readouterr().out)[0]
    assert (newest["workers"], newest["steps"], newest["state"]) == (2, 40, "running")
    assert newest["step_seconds"] == pytest.approx(0.1)
    began = launch_runs.start_of(os.getpid())  # the launcher that the run names
    assert began is not None
    assert newest["seconds"] == pytest.approx(launch_runs.age_of(began), abs=5)


def test_times_that_nobody_can_mean_are_left_out(tmp_path, capsys):
    run_dir = make_run(tmp_path / "runs", steps=0, result={"seconds": float("nan")}, plan={"world_size": "many"})
    (run_dir / "ranks/0/steps").write_bytes(b"fsdpstp2" + b"\xff" * 70000)
    assert run(["runs"]) == 0
    assert "done" in capsys.readouterr().out


def test_logs_are_the_latest_runs_also_when_no_link_says_which_it_is(tmp_path, capfdbinary):
    make_run(tmp_path / "runs", "first", age=99.0)
    make_run(tmp_path / "runs", "second", age=9.0)
    for _ in range(2):
        assert run(["runs", "logs"]) == 0
        assert capfdbinary.readouterr().out == b"hello from 0\nloss 0.5\n"
        (tmp_path / "runs/latest").unlink(missing_ok=True)
        (tmp_path / "runs/latest").symlink_to("gone")
        (tmp_path / "runs/first/ranks/0/stdout.log").write_text("old\n")


def test_prune_deletes_what_is_old_and_nothing_else(tmp_path, capsys):
    folder = tmp_path / "runs"
    for name in ("old", "fresh", "running"):
        make_run(folder, name, runs=name == "running")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data.txt").write_text("kept")
    (folder / "old/ranks/0/link").symlink_to(elsewhere)
    shutil.copytree(folder / "old", tmp_path / "linked")
    (folder / "linked").symlink_to(tmp_path / "linked")
    (folder / "notes").mkdir()
    for name in ("old", "running", "notes"):
        age(folder / name, 40)
    (folder / "old/ranks/0/link").unlink()  # a link that is no folder of ours keeps the run: here it is gone
    (folder / "old/ranks/0/tail").symlink_to(elsewhere / "data.txt")
    age(folder / "old", 40)
    assert pruned(capsys, "--older-than", "50d") == []
    assert pruned(capsys, "--older-than", "30d") == ["old"]
    assert sorted(path.name for path in folder.iterdir()) == ["fresh", "latest", "linked", "notes", "running"]
    assert (elsewhere / "data.txt").read_text() == "kept"
    assert (tmp_path / "linked/plan.json").exists()


@pytest.mark.parametrize("place", ["checkpoint-10/fsdplaunch.json", "model.safetensors", "ranks/0/w.pt", "link/"])
def test_prune_keeps_a_run_that_holds_what_is_no_launchs(tmp_path, capsys, place):
    run_dir = make_run(tmp_path / "runs")
    (run_dir / place).parent.mkdir(exist_ok=True)
    if place.endswith("/"):
        (run_dir / place.rstrip("/")).symlink_to(tmp_path)
    else:
        (run_dir / place).write_text("{}")
    age(run_dir, 40)
    assert run(["runs", "prune", "--older-than", "30d", "--yes"]) == 0
    said = capsys.readouterr().err
    found = place if place.startswith("ranks") else place.split("/")[0]
    assert f"{run_dir.name} is kept: {found} in it was not written by a launch" in said
    assert "deleted 0 runs unchanged for 30 d" in said
    assert run_dir.exists()


def test_prune_asks_and_deletes_nothing_without_an_answer(tmp_path, cli):
    age(make_run(tmp_path / "runs"), 40)
    done = cli("runs", "prune", "--older-than", "30d")
    assert done.returncode == 2
    assert "delete 1 run," in done.stderr
    assert "--yes deletes without asking" in done.stderr
    assert (tmp_path / "runs/2026-01-02_030405-ab12").exists()
    assert cli("runs", "prune", "--older-than", "soon").returncode == 2


def test_prune_deletes_only_the_folder_that_it_looked_at(tmp_path, capsys, monkeypatch):
    old, other = make_run(tmp_path / "runs", "old"), make_run(tmp_path, "other")
    age(old, 40)
    look = launch_runs.look_at_files
    looks = []

    def look_and_swap(run_dir):
        seen = look(run_dir)
        looks.append(run_dir)
        if len(looks) == 1:
            old.rename(tmp_path / "moved")
            other.rename(old)
        return seen

    monkeypatch.setattr("fsdplaunch.cli.runs.look_at_files", look_and_swap)
    assert run(["runs", "prune", "--older-than", "30d", "--yes"]) == 1
    assert "old has changed since it was listed" in capsys.readouterr().err
    assert (tmp_path / "moved/plan.json").exists()
    assert (old / "plan.json").exists()


def test_words_of_a_command_are_shown_without_secrets():
    words = "--lr 3e-4 --hf_token hf_abcdefghijkl --max_tokens 5 --wandb-key=abc http://u:p@h/x --password -v y"
    shown = "--lr 3e-4 --hf_token *** --max_tokens 5 --wandb-key=*** http://***@h/x --password -v y"
    assert hide_in_words(words.split()) == shown.split()
    assert hide_in_words(["sk-abcdefghij", "KEY=v", "batch=4"]) == ["***", "KEY=***", "batch=4"]
