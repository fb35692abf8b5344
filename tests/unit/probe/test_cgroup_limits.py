import os

import pytest

from fsdplaunch.probe.hardware import usable_cpus, usable_memory

MEMINFO = "MemTotal:       67108864 kB\nMemFree: 1 kB\n"
GIB = 1024**3


@pytest.fixture(autouse=True)
def sixteen_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


def test_usable_memory_without_cgroup_is_what_is_installed(make_root):
    assert usable_memory(make_root({"proc/meminfo": MEMINFO})) == 64 * GIB


def test_usable_memory_unknown_installed_memory_is_none(make_root):
    assert usable_memory(make_root({"proc/cpuinfo": ""})) is None


def test_usable_memory_container_v2_limit_counts(make_root):
    root = make_root(
        {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{32 * GIB}\n"}
    )
    assert usable_memory(root) == 32 * GIB


def test_usable_memory_tightest_level_of_v2_counts(make_root):
    root = make_root(
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
            "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max\n",
            "sys/fs/cgroup/slurm/job_7/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/slurm/memory.max": f"{60 * GIB}\n",
        }
    )
    assert usable_memory(root) == 8 * GIB


def test_usable_memory_v1_container_sees_its_limit_at_the_mount(make_root):
    """Docker with version 1: the path in /proc is the host's and does not exist inside."""
    root = make_root(
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        }
    )
    assert usable_memory(root) == 2 * GIB


def test_usable_memory_v1_no_limit_number_is_no_limit(make_root):
    root = make_root(
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        }
    )
    assert usable_memory(root) == 64 * GIB


def test_usable_cpus_without_quota_is_the_affinity(make_root):
    assert usable_cpus(make_root({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})) == 16


@pytest.mark.parametrize(("text", "expected"), [("400000 100000", 4), ("250000 100000", 2), ("10000 100000", 1)])
def test_usable_cpus_v2_quota_is_rounded_down_to_at_least_one(make_root, text, expected):
    assert usable_cpus(make_root({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": text})) == expected


def test_usable_cpus_v1_quota_counts_under_either_mount_name(make_root):
    root = make_root(
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        }
    )
    assert usable_cpus(root) == 3


def test_usable_cpus_v1_minus_one_is_no_quota(make_root):
    root = make_root(
        {
            "proc/self/cgroup": "3:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        }
    )
    assert usable_cpus(root) == 16
