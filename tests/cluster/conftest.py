"""Clusters on one machine: network namespaces as hosts, a real SLURM, sshd. Without root: skipped, and why."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import lab as machines
from tests.cluster.programs import ALL_REDUCE, SAVES_ON_TERM, TRAINS
from tests.cluster.slurm_lab import Slurm
from tests.cluster.sshd_lab import Sshd

PLAIN = ("--distributed-type", "MULTI_CPU", "--nproc-per-node", "2")


@pytest.fixture(scope="session")
def namespaces() -> None:
    reason = machines.obstacle()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def three(namespaces: None) -> Iterator[machines.Lab]:
    """Three machines, host0 to host2."""
    with machines.lab(3, 1) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that all machines share, with the scripts."""
    (tmp_path / "sum.py").write_text(ALL_REDUCE)
    (tmp_path / "saves.py").write_text(SAVES_ON_TERM)
    (tmp_path / "trains.py").write_text(TRAINS)
    return tmp_path


@pytest.fixture(scope="session")
def packages(namespaces: None) -> None:
    """SLURM and sshd; they are never installed unasked."""
    command = [Path(__file__).with_name("install_packages"), "--missing"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs {done.stdout.strip()}: scripts/test --with-system-packages installs them")


@pytest.fixture(scope="session")
def slurm(packages: None, three: machines.Lab) -> Iterator[Slurm]:
    """SLURM on the three machines."""
    cluster = Slurm(three)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="session")
def sshd(packages: None, three: machines.Lab) -> Iterator[Sshd]:
    """sshd on the three machines."""
    servers = Sshd(three)
    try:
        servers.up()
        yield servers
    finally:
        servers.down()
