"""What this machine has, as a driver, the kernel and cgroups say it."""

import os

import pytest

from fsdplaunch.display_text import GIB
from fsdplaunch.probe import hardware
from fsdplaunch.probe.hardware import Gpu, Hardware, describe_hardware, read_hardware, usable_cpus, usable_memory

MEMINFO = {"proc/meminfo": "MemTotal:       67108864 kB\nMemFree: 1 kB\n"}
V1, V2 = {"proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/\n"}, {"proc/self/cgroup": "0::/\n"}
IN_DOCKER = {"proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n"}
IN_SLURM = {"proc/self/cgroup": "0::/slurm/job_7/step_0\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 64),
        ({"proc/cpuinfo": ""}, None),
        (MEMINFO | V2 | {"sys/fs/cgroup/memory.max": f"{32 * GIB}\n"}, 32),
        (
            MEMINFO
            | IN_SLURM
            | {"sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max\n"}
            | {"sys/fs/cgroup/slurm/job_7/memory.max": f"{8 * GIB}\n"}
            | {"sys/fs/cgroup/slurm/memory.max": f"{60 * GIB}\n"},
            8,
        ),
        # Docker with version 1: the path in /proc is the host's and does not exist inside.
        (MEMINFO | IN_DOCKER | {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n"}, 2),
        (MEMINFO | V1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64),
    ],
    ids=["no cgroup", "nothing known", "v2", "tightest level of v2", "v1 in docker", "v1 without a limit"],
)
def test_usable_memory(make_root, files, expected):
    found = usable_memory(make_root(files))
    assert found == (expected and expected * GIB)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (V2 | {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        (V2 | {"sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        (V2 | {"sys/fs/cgroup/cpu.max": "250000 100000"}, 2),
        (V2 | {"sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
        (
            V1
            | {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000"}
            | {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000"},
            3,
        ),
        (
            {"proc/self/cgroup": "3:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}
            | {"sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            16,
        ),
    ],
)
def test_usable_cpus_are_the_affinity_cut_by_a_quota(make_root, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert usable_cpus(make_root(files)) == expected


def gpu(index, name="Tesla T4", gib=15, capability=(7, 5)):
    return Gpu(index=index, name=name, memory_bytes=gib * GIB, compute_capability=capability)


def test_read_hardware_amd_driver_without_nvidia_is_said(monkeypatch, make_root):
    monkeypatch.setattr(hardware, "driver_is_installed", lambda: False)
    found = read_hardware({}, root=make_root({"proc/meminfo": "MemTotal: 1 kB", "dev/kfd": ""}))
    assert found.gpus == ()
    assert found.has_amd
    assert "AMD" in found.notes[0]


@pytest.mark.parametrize("device", ["nvidia0", "dxg"])
def test_read_hardware_gpus_that_nothing_can_count_are_said(monkeypatch, make_root, device):
    monkeypatch.setattr(hardware, "driver_is_installed", lambda: False)
    found = read_hardware({}, root=make_root({"proc/meminfo": "MemTotal: 1 kB", f"dev/{device}": ""}))
    assert found.notes == (f"GPUs are not used: there is /dev/{device}, but no libnvidia-ml.so.1 to count them",)


def test_hardware_mixed_gpus_plan_with_the_smallest_and_the_least_able():
    mixed = Hardware(gpus=(gpu(0), gpu(1, "NVIDIA H100", 80, (9, 0))))
    assert mixed.gpu_memory_bytes == 15 * GIB
    assert not mixed.all_have_bf16
    assert describe_hardware(mixed).startswith("1 x Tesla T4 (15 GiB, sm_75), 1 x NVIDIA H100 (80 GiB, sm_90)")


def test_hardware_without_gpus_or_their_memory_has_none():
    shared = Hardware(gpus=(gpu(0, "NVIDIA GB10", 0, (12, 1)),))
    assert shared.gpu_memory_bytes is None
    assert describe_hardware(shared).startswith("1 x NVIDIA GB10 (sm_121)")
    bare = Hardware(cpu_count=2, memory_bytes=24 * GIB)
    assert bare.gpu_memory_bytes is None
    assert not bare.all_have_bf16
    assert describe_hardware(bare) == "no NVIDIA GPU, 24 GiB of memory, 2 processors"
