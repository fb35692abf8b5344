"""launch --dry-run: the exact environment and command, and nothing started."""

import json
import shlex

import pytest
import yaml

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
        "WITH_SPACES": "***",
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
    assert "WITH_SPACES=$WITH_SPACES" in words
    assert words[-3:] == ["my script.py", "$(touch hacked)", "a'b\nc"]


def test_variables_that_hold_defaults_are_shown_when_asked_for(cli, tmp_path):
    (tmp_path / "t.py").write_text("")
    plan = json.loads(cli("launch", "--dry-run", "--json", "t.py").stdout)
    assert (plan["config"], plan["workers"], plan["device"]) == (None, 2, "cpu")
    short, whole = cli("launch", "--dry-run", "t.py"), cli("launch", "--dry-run", "--all", "t.py")
    assert "variables that hold defaults are left out; --all shows them" in short.stderr
    assert "FSDPLAUNCH_LAUNCH_ROLE=default" in whole.stdout
    assert "FSDPLAUNCH_LAUNCH_ROLE" not in short.stdout
    assert "FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP" in short.stdout  # accelerate's default is another one


def test_kubernetes_objects_are_printed_as_they_would_be_applied(cli, tmp_path):
    (tmp_path / "t.py").write_text("")
    words = ["--kubernetes", "--dry-run", "--num-machines", "2", "--kubernetes.image", "i:1"]
    done = cli("launch", *words, "t.py", "a b", "$(id)")
    assert done.returncode == 0, done.stderr
    config, secret, service, job = yaml.safe_load_all(done.stdout)
    kinds = (config["kind"], secret["kind"], service["kind"], job["kind"])
    assert kinds == ("ConfigMap", "Secret", "Service", "Job")
    assert "num_machines: 2\n" in config["data"]["config.yaml"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][-3:] == ["t.py", "a b", "$$(id)"]
    assert not (tmp_path / "runs").exists()


def test_runs_of_a_folder_without_any_are_none(cli):
    done = cli("runs")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no runs in runs" in done.stderr
    assert cli("runs", "logs", "latest").returncode == 2
    done = cli("runs", "--log-dir", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--log-dir nowhere is not a folder" in done.stderr


TOKEN = "hunter2-hunter2"


@pytest.mark.parametrize(
    "route",
    [
        (),
        ("--json",),
        ("--num-machines", "2", "--main-process-ip", "10.0.0.1", "--machine-rank", "1"),
        ("--slurm", "--num-machines", "2"),
        ("--slurm", "--json"),
        ("--kubernetes", "--kubernetes.image", "i", "--kubernetes.namespace", "a b; rm -rf x"),
        ("--set", "ssh.hosts=[h0, h1]"),
    ],
    ids=lambda words: "-".join(words).replace("--", "")[:20] or "here",
)
def test_secrets_in_the_variables_are_printed_by_no_route(cli, tmp_path, route):
    (tmp_path / "t.py").write_text("")
    (tmp_path / "fsdp.yaml").write_text(f"launch:\n  env:\n    MY_TOKEN: {TOKEN}\n    PLAIN: unseen\n")
    done = cli("launch", "--cpu", "--dry-run", *route, "t.py")
    assert done.returncode == 0, done.stderr
    assert not any(value in done.stdout + done.stderr for value in (TOKEN, "unseen"))
    if "--kubernetes" in route:
        assert "would run: kubectl --namespace 'a b; rm -rf x' apply" in done.stderr
