"""Runs over machines that cannot be: one clear message, status 2, nothing written, no traceback."""

import os
from pathlib import Path

import pytest

from fsdplaunch.cli.app import run

TWO = ("--num-machines", "2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--hosts", ""), "--hosts is given nothing"),
        (("--hosts", "a,,b"), "ssh.hosts: must be names of nodes separated by commas, and 'a,,b' lacks one"),
        (("--hosts", "a,a"), "a is named twice"),
        (("--hosts", "a;id"), "'a;id' is not a name of a node"),
        (("--hosts=-oProxyCommand=id",), "'-oProxyCommand=id' is not a name of a node"),
        (("--hosts", "$(id)"), "'$(id)' is not a name of a node"),
        (("--hosts", "a", "--hostfile", "machines"), "ssh.hosts and ssh.hostfile both name nodes"),
        (("--hosts", "a", "--slurm"), "--slurm hands the run over, and ssh.hosts names nodes"),
        (("--hostfile", "machines", "--kubernetes"), "--kubernetes hands the run over, and ssh.hostfile names"),
        (("--hosts", "a,b", "--num-machines", "3"), "num_machines is 3, but ssh names 2 nodes"),
        (("--hosts", "a,b", "--machine-rank", "0"), "machine_rank is set (command line)"),
        (("--hosts", "a,b,c", "--num-processes", "8"), "num_processes is 8, which cannot be split evenly"),
        (("--hosts", "a", "--nnodes", "2:3"), "launch.nodes is 2:3, but ssh names 1 node"),
        (("--hostfile", "none"), "ssh.hostfile: none cannot be read: no such file or directory"),
        (("--hostfile", "empty"), "ssh.hostfile: empty names no node"),
        (("--hostfile", "bad"), "bad:2: 'b slots=x' is not NAME or NAME slots=N"),
        (("--hostfile", "slots", "--num-processes", "4"), "num_processes is 4, but the hostfile's slots are 3"),
        (
            ("--hostfile", "machines", "--nproc-per-node", "4"),
            "workers_per_node is 4 (command line), but a has slots=2",
        ),
        ((*TWO, "--main-process-ip", ""), "--main-process-ip is given nothing"),
        ((*TWO, "--machine-rank", "5"), "5 is not below num_machines 2; nodes count from 0"),
        ((*TWO, "--main-process-port", "99999"), "must be a whole number from 0 to 65535, got 99999"),
        ((*TWO, "--rdzv-endpoint", "a:99999"), "must be HOST:PORT, got a:99999"),
        (("--nnodes", "3:2"), "launch.nodes: must be MIN:MAX"),
    ],
)
def test_machines_that_cannot_be_are_refused_before_anything_is_written(
    monkeypatch, capsys, tmp_path: Path, words: tuple[str, ...], said: str
):
    for name in [name for name in os.environ if name.startswith(("FSDP", "ACCELERATE_", "SLURM"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    files = {
        "train.py": "",
        "machines": "a slots=2\nb\n",
        "empty": "# nobody\n",
        "bad": "a\nb slots=x\n",
        "slots": "a slots=1\nb slots=2",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert run(["launch", *words, "train.py"]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert "Traceback" not in err
    assert out == ""
    assert {path.name for path in tmp_path.iterdir()} == set(files)
