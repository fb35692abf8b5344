"""LaunchPlan: what a configuration makes of a machine, as data."""

from dataclasses import replace
from pathlib import Path

import pytest

from fsdplaunch.config.environment import decode
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import Config, LaunchSection
from fsdplaunch.errors import MachineError, UsageError
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget, NodeFacts, build_plan


def make(
    config: Config | None = None,
    *,
    gpus: int | list[str] = 0,
    environ: dict[str, str] | None = None,
    facts: dict | None = None,
    **kwargs,
) -> LaunchPlan:
    names = list(map(str, range(gpus))) if isinstance(gpus, int) else gpus
    machine = NodeFacts(gpus=names, cpus=8, python="/usr/bin/python3", environ=environ or {}, **(facts or {}))
    options = {"target": LaunchTarget(name="train.py"), "run_id": "r1", "run_dir": Path("/runs/r1"), **kwargs}
    return build_plan(resolve(config or Config()), node=machine, **options)


@pytest.mark.parametrize(
    ("config", "gpus", "workers", "device"),
    [
        (Config(), 0, 2, "cpu"),
        (Config(), 8, 8, "cuda"),
        (Config(use_cpu=True), 8, 2, "cpu"),
        (Config(num_processes=4), 0, 4, "cpu"),
        (Config(num_processes=4), 8, 4, "cuda"),
        (Config(launch=LaunchSection(workers_per_node=3)), 0, 3, "cpu"),
        (Config(launch=LaunchSection(workers_per_node="auto")), 4, 4, "cuda"),
        (Config(launch=LaunchSection(workers_per_node="gpu")), 4, 4, "cuda"),
        (Config(launch=LaunchSection(workers_per_node="cpu"), use_cpu=True), 4, 8, "cpu"),
        (Config(gpu_ids="0,2"), 4, 2, "cuda"),
        (Config(gpu_ids="all"), 4, 4, "cuda"),
    ],
)
def test_workers_and_device_follow_config_and_machine(config, gpus, workers, device):
    plan = make(config, gpus=gpus)
    assert (plan.workers, plan.device, plan.world_size) == (workers, device, workers)
    assert f"--nproc-per-node={workers}" in plan.argv


@pytest.mark.parametrize(
    ("kind", "gpus", "workers", "use_cpu"),
    [("NO", 4, 1, False), ("MULTI_GPU", 0, 2, True), ("MULTI_GPU", 4, 4, False)],
)
def test_unsharded_workers_are_one_process_or_know_that_they_share_a_cpu(kind, gpus, workers, use_cpu):
    plan = make(Config(distributed_type=kind), gpus=gpus)
    assert plan.workers == workers
    assert decode(plan.env).use_cpu is use_cpu


def test_num_processes_is_the_total_over_machines():
    config = Config(num_processes=8, num_machines=2, main_process_ip="10.0.0.1", machine_rank=1)
    plan = make(config)
    assert plan.workers == 4
    assert plan.world_size == 8
    assert "--rdzv-endpoint=10.0.0.1:29500" in plan.argv
    assert any("is_host=0" in item for item in plan.argv)


@pytest.mark.parametrize("missing", ["main_process_ip", "machine_rank"])
def test_several_machines_without_an_address_or_a_rank_are_refused(missing):
    config = Config(num_machines=2, num_processes=2, main_process_ip="10.0.0.1", machine_rank=0)
    with pytest.raises(UsageError, match="num_machines is 2"):
        make(replace(config, **{missing: None}))


def test_env_adds_the_files_own_variables_and_threads():
    config = Config(launch=LaunchSection(env={"NCCL_DEBUG": "INFO", "N": "3"}, workers_per_node=4))
    env = make(config).env
    assert (env["NCCL_DEBUG"], env["N"], env["OMP_NUM_THREADS"]) == ("INFO", "3", "2")


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONHASHSEED"])
def test_variables_set_by_the_user_are_kept(name):
    config = Config(launch=LaunchSection(keep_global_batch=True))
    assert make(config).env[name].isdigit()
    assert name not in make(config, environ={name: "1"}).env
    assert "PYTHONHASHSEED" not in make().env  # batches are the script's own: so is the order of its sets


def test_restarts_turn_off_the_shared_store():
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in make().env
    plan = make(Config(launch=LaunchSection(max_restarts=2)))
    assert plan.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "--max-restarts=2" in plan.argv


def test_gpu_ids_name_gpus_inside_of_what_is_visible():
    plan = make(Config(gpu_ids="5,4"), gpus=["4", "5", "6", "7"])
    assert (plan.gpus, plan.env["CUDA_VISIBLE_DEVICES"]) == (("5", "4"), "5,4")


def test_gpu_ids_on_a_machine_without_gpus_are_a_note():
    plan = make(Config(gpu_ids="0,1"))
    assert (plan.device, plan.workers) == ("cpu", 2)
    assert plan.notes[-1] == "no GPU is visible, though gpu_ids names 0,1: running on CPU with gloo"


@pytest.mark.parametrize(
    ("config", "gpus", "device", "hidden"),
    [
        (Config(use_cpu=True), 8, "cpu", True),
        (Config(use_cpu=True, gpu_ids="0,1"), 8, "cpu", True),
        (Config(), 0, "cpu", True),
        (Config(), 8, "cuda", False),
    ],
)
def test_workers_are_told_the_device_and_see_no_gpu_where_it_is_the_cpu(config, gpus, device, hidden):
    env = make(config, gpus=gpus).env
    assert env["FSDPLAUNCH_DEVICE"] == device
    assert (env.get("CUDA_VISIBLE_DEVICES") == "") is hidden
    assert make(config, gpus=gpus, facts={"has_amd": True}).env.get("HIP_VISIBLE_DEVICES") == (
        "-1" if hidden else None
    )


def test_program_of_its_own_is_run_without_the_bootstrap():
    target = LaunchTarget(name="./run.sh", arguments=("-m", "x"), is_python=False)
    plan = make(target=target)
    assert plan.argv[-3:] == ("./run.sh", "-m", "x")
    assert "fsdplaunch.runtime.bootstrap" not in plan.argv
    assert "whether it shards its model is not checked" in plan.notes[-1]
    with pytest.raises(UsageError, match="--no-python"):
        make(target=LaunchTarget(name="x", is_module=True, is_python=False))


def test_a_worker_for_each_gpu_needs_gpus():
    with pytest.raises(MachineError, match="this run has no GPUs"):
        make(Config(launch=LaunchSection(workers_per_node="gpu")))


@pytest.mark.parametrize(
    "said", [{"main_process_port": 29500}, {"launch": LaunchSection(rendezvous_endpoint="127.0.0.1:29500")}]
)
def test_busy_port_is_replaced_on_one_machine_and_said(said):
    assert "--rdzv-endpoint=127.0.0.1:29500" in make(Config(**said)).argv
    plan = make(Config(**said), facts={"port_is_taken": True})
    assert "--rdzv-endpoint=127.0.0.1:0" in plan.argv
    assert "the configured port is in use: another one is used" in plan.notes[-1]


def test_torchruns_options_come_from_keys():
    launch = LaunchSection(
        role="trainer",
        monitor_interval_seconds=0.5,
        rendezvous_id="job-7",
        rendezvous_options={"read_timeout": "30", "join_timeout": "9"},
        local_address="10.0.0.5",
        nodes="1:3",
    )
    assert {
        "--role=trainer",
        "--monitor-interval=0.5",
        "--rdzv-id=job-7",
        "--rdzv-conf=is_host=1,join_timeout=9,read_timeout=30",
        "--rdzv-endpoint=10.0.0.5:0",
        "--local-addr=10.0.0.5",
        "--nnodes=1:3",
    } <= set(make(Config(launch=launch)).argv)


def test_flight_recorder_is_on():
    new = make().env
    assert (new["TORCH_FR_BUFFER_SIZE"], new["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("2000", "1")
    assert new["TORCH_FR_DUMP_TEMP_FILE"].startswith("/runs/r1/")
    assert "TORCH_FR_BUFFER_SIZE" not in make(environ={"TORCH_FR_BUFFER_SIZE": "0"}).env
