"""Binding workers to processors, on the /sys of an invented machine: 2 sockets, 4 nodes, 16 cores, 32 threads."""

import pytest

from fsdplaunch.agent.worker_spec import parse_list, processors_for_ranks

NEAR = ["0000:01:00.0", "0000:02:00.0", "0000:81:00.0", "0000:82:00.0"]


@pytest.fixture
def machine(tmp_path):
    """Node n has cores 4n to 4n+3, whose second threads are 16 higher; two cores share a cache."""
    for node in range(4):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{4 * node}-{4 * node + 3},{4 * node + 16}-{4 * node + 19}\n")
    for cpu in range(32):
        core = cpu % 16
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}"
        for name, text in {
            "topology/physical_package_id": str(core // 8),
            "topology/thread_siblings_list": f"{core},{core + 16}",
            "cache/index0/level": "1",
            "cache/index0/shared_cpu_list": f"{core},{core + 16}",
            "cache/index3/level": "3",
            "cache/index3/shared_cpu_list": f"{core & ~1}-{core | 1},{(core & ~1) + 16}-{(core | 1) + 16}",
        }.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text + "\n")
    for gpu, node in zip(NEAR, (0, 0, 2, 3), strict=True):
        folder = tmp_path / "sys/bus/pci/devices" / gpu
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def bound(machine, mode, gpus=NEAR, allowed=range(32)):
    return processors_for_ranks(mode, gpus, allowed=allowed, root=machine)


def test_kernel_lists_are_read():
    assert parse_list("0-2,8\n") == {0, 1, 2, 8}
    assert parse_list("") == set()


def test_node_is_that_of_the_gpu(machine):
    first = [0, 1, 2, 3, 16, 17, 18, 19]
    assert bound(machine, "node") == [first, first, [cpu + 8 for cpu in first], [cpu + 12 for cpu in first]]


def test_socket_is_all_nodes_of_the_gpus_socket(machine):
    assert bound(machine, "socket")[0] == [*range(8), *range(16, 24)]
    assert bound(machine, "socket")[3] == [*range(8, 16), *range(24, 32)]


def test_exclusive_shares_a_nodes_cores_between_its_gpus(machine):
    assert bound(machine, "exclusive") == [
        [0, 1, 16, 17],
        [2, 3, 18, 19],
        [8, 9, 10, 11, 24, 25, 26, 27],
        [12, 13, 14, 15, 28, 29, 30, 31],
    ]


def test_core_complex_gives_each_worker_one_in_turn(machine):
    assert bound(machine, "core-complex") == [[0, 1, 16, 17], [2, 3, 18, 19], [8, 9, 24, 25], [12, 13, 28, 29]]


def test_workers_without_gpus_are_spread_over_the_nodes(machine):
    cpus = bound(machine, "exclusive", [""] * 8)
    assert [len(part) for part in cpus] == [4] * 8
    assert sorted(cpu for part in cpus for cpu in part) == list(range(32))


def test_only_allowed_processors_are_used(machine):
    assert bound(machine, "node", allowed=[1, 9])[:1] == [[1]]
    assert bound(machine, "exclusive", allowed=[1, 17])[:2] == [[1, 17], [1, 17]]


def test_machine_without_nodes_binds_nothing(tmp_path):
    assert processors_for_ranks("node", ["", ""], allowed=[0, 1], root=tmp_path) == [[], []]
