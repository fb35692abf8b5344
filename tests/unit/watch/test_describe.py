"""`fsdplaunch runs show` and `compare`: all that a run was, and no secret."""

import json
import shutil

import pytest

from fsdplaunch.cli.app import run
from fsdplaunch.config.load import load_config
from fsdplaunch.config.render import render
from tests.fake_runs import make_run, slow

SECRETS = ("hf_abcdefghijkl", "s3cret", "sk-aaaaaaaaaa", "hunter2")


def full_run(folder, name, *overrides: str, **how):
    """A run with everything that a folder may hold."""
    run_dir = make_run(folder, name, **how)
    (run_dir / "config.yaml").write_text(render(load_config(overrides=overrides).config, full=True))
    versions = {"fsdplaunch": "1.2", "torch": "2.13.0"}
    job = {"route": "here", "host": "elsewhere", "pid": 5, "nodes": ["host0", "host1"], "versions": versions}
    (run_dir / "job.json").write_text(json.dumps(job))
    (run_dir / "revision").write_text("0123abc-dirty\n")
    (run_dir / "ranks/0/checkpoints").write_text("/data/checkpoint-10\n/data/checkpoint-20\n")
    return run_dir


def facts(capsys, *words: str) -> dict[str, str]:
    assert run(["runs", "show", "--log-dir", "runs", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:13].strip(): line[13:] for line in lines}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_show_says_what_ran_how_and_what_became_of_it(capsys, tmp_path):
    failure = {"rank": 1, "message": "ValueError: no", "why": "it is so", "try": []}
    plan = {"origins": {"mixed_precision": "fsdp.yaml:3"}}
    full_run(
        tmp_path / "runs", "r1", "mixed_precision=bf16", plan=plan, result={"exit_code": 1, "failure": failure}
    )
    found = facts(capsys)
    assert found["state"] == "failed (1), 2 m 05 s"
    assert found["command"] == "train.py --lr 3e-4"
    assert found["made with"] == "fsdplaunch 1.2, torch 2.13.0"
    assert (found["revision"], found["workers"], found["nodes"]) == ("0123abc-dirty", "2 workers", "host0, host1")
    assert found["steps"].startswith("step 40, 100.0 ms a step, 10 steps/s")
    assert found["failure"] == "rank 1: ValueError: no"
    assert found["why"] == "it is so"
    assert found["checkpoints"] == "/data/checkpoint-20, /data/checkpoint-10"
    assert run(["runs", "show", "r1", "--log-dir", "runs"]) == 0
    text = capsys.readouterr().out
    assert "  mixed_precision: bf16" in text
    assert "# fsdp.yaml:3" in text
    assert run(["runs", "show", "--json", "--log-dir", "runs"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["config"]["mixed_precision"] == {"value": "bf16", "from": "fsdp.yaml:3"}
    assert data["config"]["precision.param"]["from"] == "follows"
    assert (data["command"], data["bound_by"]) == (["train.py", "--lr", "3e-4"], "compute")


def test_compare_says_only_what_differs(capsys, tmp_path):
    for name, word, times in (("a", "bf16", slow(1)), ("b", "no", slow(1, factor=6))):
        full_run(tmp_path / "runs", name, f"mixed_precision={word}", times=times)
    assert run(["runs", "compare", "a", "b", "--json", "--log-dir", "runs"]) == 0
    rows = {name: (one, other) for name, one, other in json.loads(capsys.readouterr().out)["differs"]}
    assert rows["mixed_precision"] == ("bf16", "-")  # which is the default
    assert rows["steps"][0].startswith("step 40, 310.0 ms a step")
    assert rows["steps"][1].startswith("step 40, 610.0 ms a step")
    assert rows["run"] == ("runs/a", "runs/b")
    assert not {"command", "workers", "state"} & set(rows)
    assert run(["runs", "compare", "a", "b", "--log-dir", "runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["run", "  runs/a", "  runs/b"]
    assert lines[lines.index("steps") + 1].startswith("  step 40, 310.0 ms a step")


def test_no_secret_is_in_any_of_it(capsys, tmp_path):
    words = ["--hf-token", SECRETS[0], "--password=hunter2", SECRETS[2], "--lr", "3e-4"]
    env = {"launch.env.S3": "s3cret"}
    failure = {"rank": 0, "message": f"401 for {SECRETS[0]}", "why": None}
    overrides = [f"{key}={value}" for key, value in env.items()]
    run_dir = full_run(tmp_path / "runs", "r1", plan={"arguments": words}, result={"failure": failure})
    config = load_config(overrides=overrides).config
    from fsdplaunch.launch.secret_variables import without_variables

    (run_dir / "config.yaml").write_text(render(without_variables(config), full=True))
    (run_dir / "ranks/0/stdout.log").write_text(f"token {SECRETS[0]}\n")
    for command in (
        ["runs"], ["runs", "--json"], ["runs", "show"], ["runs", "show", "--json"], ["watch", "--once"],
        ["watch", "--once", "--json"], ["runs", "show", "--html", "page.html"],
        ["runs", "compare", "r1", "r1"], ["runs", "compare", "r1", "r1", "--json"],
    ):  # fmt: skip
        assert run([*command, "--log-dir", "runs"]) == 0
    said = "".join(capsys.readouterr()) + (tmp_path / "page.html").read_text()
    assert [secret for secret in SECRETS if secret in said] == []
    assert "--lr 3e-4" in said


def test_files_that_no_launch_writes_are_shown_as_far_as_they_go(capsys, tmp_path):
    run_dir = full_run(tmp_path / "runs", "r1")
    for name in ("job.json", "plan.json", "result.json"):
        kept = (run_dir / name).read_text()
        for text in (
            "[]",
            "{",
            '{"nodes": 3, "versions": [1], "origins": 5, "arguments": {"a": 1}, "failure": [2]}',
        ):
            (run_dir / name).write_text(text)
            assert run(["runs", "show", "--log-dir", "runs"]) == 0
        (run_dir / name).write_text(kept)
    (run_dir / "config.yaml").write_text("no_such: [")
    shutil.rmtree(run_dir / "ranks")
    assert run(["runs", "show", "--log-dir", "runs"]) == 0
    assert "no rank has made a step yet" in capsys.readouterr().out
