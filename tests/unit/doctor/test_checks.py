"""Every check of the doctor, on machines made up for it."""

from dataclasses import replace

import pytest

from fsdplaunch.doctor import checks
from fsdplaunch.doctor.checks import run_checks, status_of, summary
from fsdplaunch.doctor.facts import Disk, DoctorFacts, NetworkInterface, TorchFacts
from fsdplaunch.probe.hardware import Driver, Gpu
from tests.yaml_config import config_of as config

GIB = 1024**3
CUDA_TORCH = TorchFacts(version="2.13.0+cu130", cuda="13.0", nccl="2.29.1", archs=("sm_80", "sm_90"), sees_gpus=2)

BLIND_TORCH = replace(CUDA_TORCH, sees_gpus=0)


def gpu(index, **changes):
    return Gpu(
        **{"index": index, "name": "H100", "memory_bytes": 80 * GIB, "compute_capability": (9, 0)} | changes
    )


NO_DRIVER = {"driver": Driver(), "gpus": ()}
TWO_MACHINES = config("num_machines=2", "main_process_ip=a")
GOOD = DoctorFacts(
    python="3.11.7",
    torch=CUDA_TORCH,
    driver=Driver(version="580.1", cuda=(13, 0), peers={("0", "1"): True}),
    gpus=(gpu(0), gpu(1)),
    cpus=16,
    memory=512 * GIB,
    shared_memory=64 * GIB,
    open_files=(65536, 65536),
    disks=(Disk(use="checkpoints", path="/data", kind="ext4", free=900 * GIB, writable=True),),
    interfaces=(
        NetworkInterface(name="lo", address="127.0.0.1"),
        NetworkInterface(name="eth0", address="10.0.0.5", speed=100000),
    ),
    hostname="node1",
    own_address="10.0.0.5",
    config=config(),
    config_path="fsdp.yaml",
)


def found(check, **changes):
    """(status, text) of what a check says about the good machine with changes."""
    return [(each.status, each.text) for each in check(replace(GOOD, **changes))]


def only(check, **changes):
    (one,) = found(check, **changes)
    return one


def test_good_machine_has_no_problem_and_exit_status_0():
    checks = run_checks(GOOD)
    assert [check for check in checks if check.status in ("problem", "warning")] == []
    assert status_of(checks) == 0
    assert summary(checks) == "no problems"


def test_any_problem_makes_exit_status_3():
    checks = run_checks(replace(GOOD, torch=TorchFacts(error="No module named torch"), cpus=1))
    assert status_of(checks) == 3
    assert summary(checks) == "1 problem, 1 warning"


@pytest.mark.parametrize(
    ("torch", "status", "says"),
    [
        (CUDA_TORCH, "ok", "2.13.0+cu130, CUDA 13.0, NCCL 2.29.1"),
        (None, "skipped", "not asked"),
        (TorchFacts(error="boom"), "problem", "cannot be used: boom"),
        (replace(CUDA_TORCH, version="2.5.1"), "problem", "2.5.1 is too old"),
        (replace(CUDA_TORCH, version="9.9.9"), "warning", "9.9.9 is too new to have been tested"),
        (replace(CUDA_TORCH, lacks="gloo"), "problem", "lacks gloo"),
        (replace(CUDA_TORCH, nccl=""), "problem", "lacks NCCL"),
    ],
)
def test_torch(torch, status, says):
    got, text = only(checks.check_torch, torch=torch)
    assert got == status
    assert says in text


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({}, "ok", "580.1, runs CUDA up to 13.0"),
        ({"driver": Driver(version="535.1", cuda=(12, 2))}, "problem", "torch needs 13.0"),
        ({"torch": replace(CUDA_TORCH, cuda="", nccl="")}, "problem", "built without CUDA"),
        ({"torch": replace(CUDA_TORCH, sees_gpus=1, gpu_error="e")}, "problem", "torch can use 1: e"),
        (NO_DRIVER | {"torch": BLIND_TORCH}, "warning", "no NVIDIA driver, but torch has CUDA"),
        (NO_DRIVER | {"torch": CUDA_TORCH}, "warning", "can use 2 GPUs, which NVIDIA's library"),
        (NO_DRIVER | {"torch": BLIND_TORCH, "config": config("use_cpu=true")}, "skipped", "CPU and gloo"),
    ],
)
def test_driver_matches_torch(changes, status, says):
    got, text = only(checks.check_driver, **changes)
    assert got == status
    assert says in text


def test_gpus_that_are_not_there():
    assert only(checks.check_gpus, gpus=(gpu(0),))[0] == "ok"
    assert only(checks.check_gpus, gpus=())[0] == "skipped"
    assert only(checks.check_gpus, gpus=(), config=config("launch.workers_per_node=gpu"))[0] == "problem"


def test_gpus_that_are_in_use_have_lost_data_or_cannot_compute_it():
    assert found(checks.check_use, config=config("mixed_precision=bf16")) == []
    ((status, text),) = found(checks.check_use, gpus=(gpu(0), gpu(1, busy=((1, 21 * GIB),))))
    assert (status, "GPU 1 is in use by process 1," in text, "21.0 GiB" in text) == ("warning", True, True)
    assert only(checks.check_use, gpus=(gpu(0), gpu(5, bad_memory=4)))[1].startswith("GPU 5 has 4")
    old = (gpu(0, compute_capability=(7, 5)),)
    assert found(checks.check_use, gpus=old, config=config("mixed_precision=bf16")) == [
        ("problem", "GPU 0 (H100) cannot compute in bf16"),
        ("problem", "torch has no code for GPU 0 (sm_75)"),
    ]


@pytest.mark.parametrize(
    ("check", "changes", "status"),
    [
        (checks.check_shared_memory, {}, "ok"),
        (checks.check_shared_memory, {"shared_memory": 64 * 1024**2}, "problem"),
        (checks.check_shared_memory, {"shared_memory": 64 * 1024**2, "gpus": ()}, "warning"),
        (checks.check_shared_memory, {"shared_memory": None}, "warning"),
        (checks.check_limits, {}, "ok"),
        (checks.check_limits, {"open_files": (1024, 65536)}, "warning"),
        (checks.check_limits, {"open_files": (256, 256)}, "problem"),
    ],
)  # fmt: skip
def test_limits_of_the_host(check, changes, status):
    assert only(check, **changes)[0] == status


@pytest.mark.parametrize(
    ("changes", "statuses"),
    [
        ({}, ["ok", "ok"]),
        ({"cpus": 1, "memory": GIB}, ["warning", "warning"]),
        ({"memory": None}, ["ok", "skipped"]),
    ],
)
def test_processors_and_memory(changes, statuses):
    assert [status for status, _ in found(checks.check_host, **changes)] == statuses


def test_locked_memory_matters_between_machines_with_gpus():
    limits = found(checks.check_limits, config=TWO_MACHINES, locked_memory=8 * 1024**2)
    assert ("warning", "locked memory is limited to 8 MiB: RDMA registers more") in limits
    assert len(found(checks.check_limits, locked_memory=8 * 1024**2)) == 1


@pytest.mark.parametrize(
    ("changes", "machines", "status"),
    [
        ({}, 1, "ok"),
        ({"writable": False}, 1, "problem"),
        ({"free": 1024}, 1, "problem"),
        ({"free": 5 * GIB}, 1, "warning"),
        ({"kind": "overlay"}, 1, "warning"),
        ({}, 2, "warning"),
        ({"kind": "nfs4"}, 2, "ok"),
    ],
)
def test_disk(changes, machines, status):
    disk = replace(GOOD.disks[0], **changes)
    asked = config(f"num_machines={machines}", *(["main_process_ip=a"] if machines > 1 else []))
    assert only(checks.check_disks, disks=(disk,), config=asked)[0] == status


def test_interface_that_gloo_will_take_is_named():
    status, text = only(checks.check_interfaces)
    assert (status, text) == ("ok", "gloo takes eth0 (10.0.0.5) at 100 Gbit/s; up: eth0")


def test_variable_that_names_no_interface_is_a_problem():
    wrong = found(checks.check_interfaces, environ={"NCCL_SOCKET_IFNAME": "ib"})
    assert wrong[0] == ("problem", "NCCL_SOCKET_IFNAME=ib names no interface that is up; there are lo, eth0")


@pytest.mark.parametrize(
    ("wanted", "is_there"),
    [("eth", True), ("=eth", False), ("=eth0", True), ("^docker0,lo", True), ("ib,eth", True)],
)
def test_variables_are_read_in_nccls_notation(wanted, is_there):
    texts = [text for _, text in found(checks.check_interfaces, environ={"GLOO_SOCKET_IFNAME": wanted})]
    assert any(text.startswith("gloo takes eth0") for text in texts) is is_there


def test_name_that_other_machines_cannot_use():
    assert only(checks.check_name)[0] == "ok"
    assert only(checks.check_name, own_address="127.0.1.1", config=TWO_MACHINES)[0] == "warning"
    assert only(checks.check_name, own_address="", config=TWO_MACHINES)[0] == "problem"


def test_port():
    assert only(checks.check_port)[0] == "ok"
    assert only(checks.check_port, port=29500) == ("ok", "29500 is free")
    assert only(checks.check_port, port=29500, port_is_taken=True)[0] == "warning"


def test_config_that_is_wrong_or_that_this_machine_cannot_do():
    assert only(checks.check_config) == ("ok", "fsdp.yaml")
    assert only(checks.check_config, config=None, config_errors=("fsdp.yaml:1:1: wrong",))[0] == "problem"
    status, text = only(checks.check_config, config=config("num_processes=4"))
    assert (status, text) == ("problem", "the configuration sets 4 workers on this node, it has 2 visible GPUs")


def test_what_the_network_test_measured():
    measured = {"world": 4, "hosts": ["a", "a", "b", "b"], "wrong": {}, "all_reduce": 5e9, "backend": "gloo"}
    (right,) = checks.check_connections(measured)
    assert (right.status, right.text) == ("ok", "correct on all 4 ranks, 5.0 GB/s per link (gloo)")
    (wrong,) = checks.check_connections(measured | {"wrong": {"2": [1023]}})
    assert (wrong.status, wrong.text) == ("problem", "rank 2 on b got a wrong sum for 1023 elements")
