"""Reading this machine, and files laid out like another's; a block for a bug report tells no secrets."""

import pytest

from fsdplaunch.doctor.facts import file_system, probe_torch, read_interfaces, redact


def test_interfaces_that_are_down_are_left_out(tmp_path):
    for name, state, speed in (("eth0", "up", "25000"), ("eth1", "down", "-1"), ("tun0", "unknown", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(state)
        (tmp_path / name / "speed").write_text(speed)
    assert [(each.name, each.speed) for each in read_interfaces(tmp_path)] == [("eth0", 25000), ("tun0", None)]


def test_file_system_is_that_of_the_deepest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("a / ext4 rw 0 0\nb /data nfs4 rw 0 0\nc /data/my\\040disk xfs rw 0 0\n")
    assert file_system("/data/x", mounts) == "nfs4"
    assert file_system("/data/my disk/y", mounts) == "xfs"
    assert file_system("/database", mounts) == "ext4"


def test_interpreter_that_cannot_import_torch_says_why(tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n")
    fake.chmod(0o755)
    assert probe_torch(str(fake)).error == "ModuleNotFoundError: No module named torch"
    assert "cannot be started" in probe_torch(str(tmp_path / "absent")).error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HF_TOKEN=hf_abcdefghij", "HF_TOKEN=***"),
        ('{"WANDB_API_KEY": "abc def", "X": "1"}', '{"WANDB_API_KEY": ***, "X": "1"}'),
        ("git clone https://bob:pw@host/x", "git clone https://***@host/x"),
        ("saw ghp_0123456789abcdef there", "saw *** there"),
        ("/home/alice/run and /Users/bob/x", "/home/USER/run and /Users/USER/x"),
        ("alice on gpu-01 at 10.1.2.3, alice2", "USER on HOST at ADDRESS, alice2"),
        ("127.0.0.1 and torch 2.13.0", "127.0.0.1 and torch 2.13.0"),
    ],
)
def test_what_tells_too_much_is_replaced(text, expected):
    assert redact(text, users=["alice"], hosts=["gpu-01"]) == expected
