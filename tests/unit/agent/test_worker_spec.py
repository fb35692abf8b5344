"""What each worker of a node gets, its processors by the /sys of an invented machine."""

from pathlib import Path

import pytest

from fsdplaunch.agent.main import preload_lists, split
from fsdplaunch.agent.worker_spec import make_worker_spec, parse_list, processors_for_ranks
from fsdplaunch.config.schema.config import Config, LaunchSection
from fsdplaunch.config.schema.sharding_sections import ParallelismConfig
from fsdplaunch.features import LAYERS

PYTHON = ["-m", "fsdplaunch.runtime.bootstrap", "t.py", "--x"]


def made(config=None, command=PYTHON, workers=2):
    return make_worker_spec(config or Config(), command, run_dir=Path("/r"), workers=workers, is_reported=True)


def test_options_end_where_the_workers_command_begins():
    assert split(["--a=1", "--b=2", *PYTHON]) == (["--a=1", "--b=2"], PYTHON)
    assert split(["--a=1", "./run.sh", "--a=1"]) == (["--a=1"], ["./run.sh", "--a=1"])


def test_sharding_is_preloaded_for_runs_that_shard():
    first, then = preload_lists(Config(), PYTHON)
    assert first == ("torch", "torch.distributed")
    assert "fsdplaunch.runtime.torch_internals.late_imports" in then
    _, plain = preload_lists(
        Config(distributed_type="MULTI_GPU", launch=LaunchSection(preload=("torch", "x"))), PYTHON
    )
    assert "fsdplaunch.runtime.torch_internals.late_imports" not in plain
    assert plain[-2:] == ("torch", "x")
    assert preload_lists(Config(), ["./run.sh"]) == ((), ())
    assert LAYERS not in then
    split = Config(parallelism_config=ParallelismConfig(parallelism_config_tp_size=2))
    assert LAYERS in preload_lists(split, PYTHON)[1]


@pytest.mark.parametrize(
    ("visible", "own"),
    [("5,7", ("5", "7")), (None, ("0", "1")), ("", ("", "")), ("GPU-a, GPU-b", ("GPU-a", "GPU-b"))],
)
def test_virtual_local_rank_shows_each_worker_its_own_gpu(monkeypatch, visible, own):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    spec = made(Config(launch=LaunchSection(virtual_local_rank=True)))
    assert spec.variables == {
        rank: {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": name} for rank, name in enumerate(own)
    }


@pytest.fixture
def machine(tmp_path):
    """Node n has cores 4n to 4n+3, whose second threads are 8 higher; two GPUs are at node 0 and one at node 1."""
    for node in range(2):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{4 * node}-{4 * node + 3},{4 * node + 8}-{4 * node + 11}\n")
    for cpu in range(16):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    for gpu, node in zip(NEAR, (0, 0, 1), strict=True):
        folder = tmp_path / "sys/bus/pci/devices" / gpu
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


NEAR = ["0000:01:00.0", "0000:02:00.0", "0000:81:00.0"]
FIRST, SECOND = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("mode", "gpus", "allowed", "bound"),
    [
        ("node", NEAR, range(16), [FIRST, FIRST, SECOND]),
        ("node", NEAR, [1, 5], [[1], [1], [5]]),
        ("exclusive", NEAR, range(16), [[0, 1, 8, 9], [2, 3, 10, 11], SECOND]),
        ("exclusive", [""] * 4, range(16), [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]),
        ("exclusive", NEAR[:2], [1, 9], [[1, 9], [1, 9]]),
    ],
)
def test_workers_are_bound_near_their_gpus(machine, mode, gpus, allowed, bound):
    assert processors_for_ranks(mode, gpus, allowed=allowed, root=machine) == bound


def test_kernel_lists_are_read_and_a_machine_without_nodes_binds_nothing(tmp_path):
    assert (parse_list("0-2,8\n"), parse_list("")) == ({0, 1, 2, 8}, set())
    assert processors_for_ranks("node", ["", ""], allowed=[0, 1], root=tmp_path) == [[], []]
