"""What is found to be in the way before a launch."""

import shutil
import socket
from types import SimpleNamespace

import pytest

from fsdplaunch.config.schema.config import CheckpointSection, Config, LaunchSection
from fsdplaunch.config.schema.sharding_sections import FsdpConfig
from fsdplaunch.launch import preflight
from fsdplaunch.launch.plan import LaunchTarget, join_port
from fsdplaunch.launch.preflight import (
    check_port,
    check_sharder,
    check_space,
    check_target,
    check_weights,
    is_taken,
)
from fsdplaunch.probe import torch_version


def messages(findings):
    return [finding.message for finding in findings]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"x = 1\n", None),
        (b"def f(:\n    pass\n", "t.py:1: invalid syntax: def f(:"),
        (b"x = 1\nreturn x\n", "t.py:2: 'return' outside function: return x"),
        (b"a\0b", "t.py"),
        (b"\xff\xfe", "t.py"),
        (b"import warnings\nassert (1, 'x')\n", None),
    ],
)
def test_script_must_compile(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_bytes(text)
    found = messages(check_target(LaunchTarget(name="t.py")))
    assert len(found) == (said is not None)
    assert all(line.startswith(said) and "\n" not in line for line in found)


@pytest.mark.parametrize(
    ("version", "text", "noted"),
    [
        (1, "torch.optim.SGD(model.parameters())", True),
        (2, "torch.optim.SGD(model.parameters())", False),
        (1, "import mine; mine.main()", False),  # which may shard
        (1, "from accelerate import Accelerator; torch.optim.SGD", False),
        (1, "from torch.distributed.fsdp import fully_shard; torch.optim.SGD", False),
    ],
)
def test_plain_script_under_fsdp1_is_noted_with_two_commands(tmp_path, version, text, noted):
    (tmp_path / "t.py").write_text(text)
    config = Config(distributed_type="FSDP", fsdp_config=FsdpConfig(fsdp_version=version))
    plan = SimpleNamespace(target=LaunchTarget(name=str(tmp_path / "t.py")), config=config, env={})
    found = list(check_sharder(plan))
    assert [finding.fatal for finding in found] == [False] * noted
    assert not noted or "launch --fsdp-version 2" in found[0].hint
    assert not noted or "config set fsdp_version=2" in found[0].hint


def test_folder_is_checked_by_its_main_and_an_archive_is_not_read(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__main__.py").write_text("1 +")
    (tmp_path / "app.pyz").write_bytes(b"PK\3\4 not python")
    assert "app/__main__.py:1" in messages(check_target(LaunchTarget(name=str(tmp_path / "app"))))[0]
    assert messages(check_target(LaunchTarget(name=str(tmp_path / "app.pyz")))) == []


def test_module_must_be_findable_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text("raise SystemExit")
    assert messages(check_target(LaunchTarget(name="mine.train", is_module=True))) == []
    assert messages(check_target(LaunchTarget(name="theirs", is_module=True))) == ["no module named theirs"]


def test_program_must_be_executable(tmp_path):
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    target = LaunchTarget(name=str(tmp_path / "run.sh"), is_python=False)
    assert "not an executable program" in messages(check_target(target))[0]
    (tmp_path / "run.sh").chmod(0o755)
    assert messages(check_target(target)) == []
    assert messages(check_target(LaunchTarget(name="true", is_python=False))) == []


def test_missing_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch_version, "installed", lambda: None)
    (finding,) = preflight.check_torch()
    assert ("has no torch" in finding.message, finding.fatal) == (True, True)
    assert "pip install 'torch>=2." in finding.hint


@pytest.mark.parametrize(("free", "fatal"), [(2**40, None), (500 * 2**20, False), (10 * 2**20, True)])
def test_little_space_is_said_and_none_is_refused(tmp_path, monkeypatch, free, fatal):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    found = list(check_space([tmp_path / "runs/x", tmp_path / "checkpoints"]))
    assert [finding.fatal for finding in found] == ([] if fatal is None else [fatal])
    (tmp_path / "file").write_text("")
    assert messages(check_space([tmp_path / "file"])) == [f"{tmp_path}/file cannot be written to"]


def test_weights_must_be_there_and_whole(tmp_path):
    def found(where):
        return messages(check_weights(Config(checkpoint=CheckpointSection(weights=str(where)))))

    assert list(check_weights(Config())) == []
    assert found(tmp_path / "gone") == [f"checkpoint.weights: no model folder {tmp_path}/gone"]
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    assert "model.safetensors cannot be read" in found(tmp_path)[0]
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert found(tmp_path) == []


def test_port_is_checked_where_it_is_opened():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        assert (is_taken(taken), is_taken(0)) == (True, False)
        machines = {"num_machines": 2, "num_processes": 2, "main_process_ip": "h", "main_process_port": taken}
        assert "is in use, as ss -ltnp shows" in messages(check_port(Config(machine_rank=0, **machines)))[0]
        assert messages(check_port(Config(machine_rank=1, **machines))) == []


def test_port_comes_from_the_endpoint_or_the_main_process():
    assert join_port(Config()) == 0
    assert join_port(Config(num_machines=2)) == 29500
    assert join_port(Config(main_process_port=7)) == 7
    assert join_port(Config(launch=LaunchSection(rendezvous_endpoint="[::1]:9"))) == 9


def test_folder_of_warm_interpreters_that_others_may_enter_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    warm = Config(launch=LaunchSection(keep_warm_seconds=60))
    assert list(preflight.check_warm_folder(warm)) == []
    (tmp_path / "fsdplaunch_warm").mkdir()
    (tmp_path / "fsdplaunch_warm").chmod(0o770)
    (found,) = preflight.check_warm_folder(warm)
    assert "no interpreter is kept warm" in found.message
    assert (found.fatal, list(preflight.check_warm_folder(Config()))) == (False, [])
