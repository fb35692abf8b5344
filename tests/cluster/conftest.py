"""Clusters on one machine: network namespaces as hosts, a real SLURM, sshd. Without root: skipped, and why."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import lab as machines
from tests.cluster.programs import ALL_REDUCE, SAVES_ON_TERM

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
    return tmp_path
