"""`fsdplaunch doctor` as a user calls it, without importing torch."""

import json


def test_one_line_per_check_and_exit_status_0(cli):
    done = cli("doctor", "--no-torch", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok       python ")
    assert any(line.startswith("skipped  torch ") and "not asked" in line for line in lines)
    assert lines[-1].startswith(("no problems", "1 warning", "2 warnings", "3 warnings"))


def test_broken_configuration_is_a_problem_and_exit_status_3(cli, tmp_path):
    (tmp_path / "fsdp.yaml").write_text("mixed_precision: bf17\n")
    done = cli("doctor", "--no-torch", "--json")
    assert done.returncode == 3
    problems = [check for check in json.loads(done.stdout)["checks"] if check["status"] == "problem"]
    assert [check["topic"] for check in problems] == ["config"]
    assert problems[0]["text"].startswith("fsdp.yaml:1:1: mixed_precision")


def test_paste_hides_what_the_configuration_keeps_secret(cli, tmp_path):
    (tmp_path / "fsdp.yaml").write_text("launch:\n  env:\n    WANDB_API_KEY: abcdef\n")
    done = cli("doctor", "--no-torch", "--paste", NCCL_TOKEN="s3cret", USER="somebody")
    assert done.returncode == 0
    assert done.stdout.startswith("```\nfsdplaunch ")
    assert "WANDB_API_KEY" in done.stdout
    assert "NCCL_TOKEN=***" in done.stdout
    assert not any(secret in done.stdout for secret in ("abcdef", "s3cret", "somebody"))
