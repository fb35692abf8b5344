"""Machines and jobs to suggest for."""

import pytest

from fsdplaunch.display_text import GIB
from fsdplaunch.probe.hardware import Gpu, Hardware
from fsdplaunch.probe.scheduler import Cluster
from fsdplaunch.wizard.state import SuggestionFacts


def _gpus(count, name="NVIDIA H100 80GB HBM3", gib=80, capability=(9, 0)):
    return tuple(
        Gpu(index=i, name=name, memory_bytes=gib * GIB, compute_capability=capability) for i in range(count)
    )


MACHINES = {
    "laptop": SuggestionFacts(hardware=Hardware(cpu_count=2, memory_bytes=24 * GIB), cluster=Cluster()),
    "one_t4": SuggestionFacts(
        hardware=Hardware(gpus=_gpus(1, "Tesla T4", 15, (7, 5)), cpu_count=8, memory_bytes=32 * GIB),
        cluster=Cluster(),
    ),
    "eight_h100": SuggestionFacts(
        hardware=Hardware(gpus=_gpus(8), cpu_count=96, memory_bytes=2048 * GIB), cluster=Cluster()
    ),
    "slurm_2x8": SuggestionFacts(
        hardware=Hardware(gpus=_gpus(8), cpu_count=96, memory_bytes=2048 * GIB),
        cluster=Cluster(kind="slurm", job_id="7", num_nodes=2, node_rank=0, gpus_on_node=8, node_list="gpu-[1-2]"),
    ),
    "small_container": SuggestionFacts(
        hardware=Hardware(gpus=_gpus(8), cpu_count=16, memory_bytes=32 * GIB), cluster=Cluster()
    ),
}


@pytest.fixture
def machines():
    """Facts by machine name."""
    return MACHINES
