"""launch --dry-run: the exact environment and command, and nothing started."""

import json
import shlex

YAML = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
launch:
  env:
    WITH_SPACES: a b'c
"""


def test_json_is_one_object_with_env_and_argv(cli, tmp_path):
    (tmp_path / "fsdp.yaml").write_text(YAML)
    (tmp_path / "t.py").write_text("")
    done = cli("launch", "--dry-run", "--json", "t.py", "--lr", "1", "--", "--dry-run")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["argv"][-5:] == ["t.py", "--lr", "1", "--", "--dry-run"]
    assert all(isinstance(value, str) for value in plan["env"].values())
    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "WITH_SPACES": "a b'c",
    }
    assert {name: plan["env"][name] for name in expected} == expected
    assert plan["workers"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fsdp.yaml", "t.py"]


def test_text_is_a_command_that_a_shell_reads_back(cli, tmp_path):
    (tmp_path / "fsdp.yaml").write_text(YAML)
    (tmp_path / "my script.py").write_text("")
    done = cli("launch", "--dry-run", "my script.py", "$(touch hacked)", "a'b\nc")
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout.replace("\\\n", " "))
    assert words[0] == "env"
    assert "WITH_SPACES=a b'c" in words
    assert words[-3:] == ["my script.py", "$(touch hacked)", "a'b\nc"]


def test_command_line_beats_environment_beats_file(cli, tmp_path):
    (tmp_path / "fsdp.yaml").write_text(YAML)
    (tmp_path / "t.py").write_text("")

    def precision(*options: str, **env: str) -> str:
        done = cli("launch", "--dry-run", "--json", *options, "t.py", **env)
        return json.loads(done.stdout)["env"]["ACCELERATE_MIXED_PRECISION"]

    assert precision() == "bf16"
    assert precision(ACCELERATE_MIXED_PRECISION="fp16") == "fp16"
    assert precision("--mixed-precision", "no", ACCELERATE_MIXED_PRECISION="fp16") == "no"


def test_without_a_file_defaults_are_used_and_said(cli, tmp_path):
    (tmp_path / "t.py").write_text("")
    done = cli("launch", "--dry-run", "--json", "t.py")
    plan = json.loads(done.stdout)
    assert plan["config"] is None
    assert plan["workers"] == 2
    assert plan["device"] == "cpu"
